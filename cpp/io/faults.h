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
  int read_errno = 0;   // reads that touch the bad range fail with it
  int write_errno = 0;  // writes that touch the bad range fail with it
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

 protected:
  int64_t attempt(const Piece& piece) override;

 private:
  double chance(const Piece& piece, uint64_t salt);

  const Faults faults_;
  std::mutex gate_mutex_;
  std::condition_variable gate_;
  bool held_ = false;
};

}  // namespace offload::io
