// The engine of the tests: real transfers on a pool of threads, with seeded faults between them and the kernel.
#pragma once

#include <atomic>

#include "io/threads.h"

namespace offload::io {

struct Faults {
  uint64_t seed = 0;
  double short_rate = 0;      // share of attempts that move only a part
  double interrupt_rate = 0;  // share of attempts answered by EINTR or EAGAIN
  double delay_rate = 0;      // share of attempts delayed, and so overtaken by later ones
  unsigned delay_us_max = 0;
  double reorder_rate = 0;      // share of attempts held back until others, up to 4, have overtaken them
  double read_error_rate = 0;   // share of reads that fail with EIO
  double write_error_rate = 0;  // share of writes that fail with EIO or ENOSPC, maybe after a part was written
  double torn_rate = 0;         // share of writes of which a part is written and the whole reported
  double flip_rate = 0;         // share of reads that bring one wrong bit
  int read_errno = 0;           // reads that touch the bad range fail with it
  int write_errno = 0;          // writes that touch the bad range fail with it
  uint64_t bad_begin = 0;
  uint64_t bad_end = UINT64_MAX;
};

// The same seed, request and attempt meet the same fault, whatever thread it is on.
class FaultEngine final : public ThreadEngine {
 public:
  FaultEngine(EngineOptions options, Faults faults);
  ~FaultEngine() override;
  const char* kind() const override { return "faults"; }

  // While held, no attempt reaches the kernel; close() and drain() of a held engine wait for release().
  void hold();
  void release();
  void let_go() override { release(); }
  // From here on attempts in the bad range fail with these, where not 0.
  void fail(int read_errno, int write_errno);
  uint64_t lies() const { return lies_.load(); }  // writes torn and bits flipped

 protected:
  int64_t attempt(const Piece& piece) override;

 private:
  double chance(const Piece& piece, uint64_t salt) const;
  void wait_turn(const Piece& piece);
  void left();
  int64_t tampered(const Piece& piece);
  int64_t partly(const Piece& piece, uint64_t length);
  uint64_t part_of(const Piece& piece) const;

  const Faults faults_;
  std::mutex gate_mutex_;
  std::condition_variable gate_;
  bool held_ = false;
  unsigned active_ = 0;  // attempts begun and not ended, of which
  unsigned parked_ = 0;  // these wait to be overtaken
  uint64_t ended_ = 0;
  std::atomic<int> read_errno_;
  std::atomic<int> write_errno_;
  std::atomic<uint64_t> lies_{0};
};

}  // namespace offload::io
