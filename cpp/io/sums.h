// Remembers what was written to a file, as a sum per block, and tells whether a read returns it.
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>
#include <vector>

namespace offload::io {

struct Piece;

// [Note: sums]
// A sum covers an aligned block of 4096 bytes, or, where a transfer ends within one, the part that it wrote (a
// fragment). Direct reads bring whole blocks anyway and buffered ones are widened to, so every read is compared with
// all that was written of its blocks, however transfers cut them. A write of a part of a block forgets the sum of the
// whole: its other bytes are unverified until they are written again. What this process has not written has no sum.
//
// [Note: contested]
// Bytes that two pieces move at once, one of them writing, are the callers' race: neither piece is compared or
// remembered. A write forgets the old sums before the kernel is asked and the new ones count when it has answered, so
// a piece that ends meanwhile finds no sum or the right one.
class Sums {
 public:
  static constexpr uint64_t kBlockBytes = 4096;

  // Before the piece's first request to the kernel, then once after its last; a piece that failed is dropped instead.
  void begin(Piece& piece) noexcept;
  void drop(Piece& piece);
  // Returns what is wrong, empty if nothing is; adds the bytes compared to `verified`.
  std::string settle(Piece& piece, uint64_t& verified);

  uint64_t nbytes() const;  // of memory taken

 private:
  struct Fragment {
    uint32_t begin;  // within the block
    uint32_t end;
    uint32_t sum;
  };
  struct Wanted {
    uint64_t begin;  // in the file
    uint64_t end;
    uint32_t sum;
  };
  using Segment = std::unique_ptr<uint32_t[]>;

  uint32_t* entry(uint64_t block, bool make);
  void forget(uint64_t begin, uint64_t end);
  void remember(uint64_t begin, uint64_t end, const std::vector<uint32_t>& sums);
  std::vector<Wanted> wanted(const Piece& piece, uint64_t seen_begin, uint64_t seen_end);
  bool leave(Piece& piece);

  mutable std::mutex mutex_;
  std::vector<Segment> table_;  // 0: no sum
  std::unordered_map<uint64_t, std::vector<Fragment>> fragments_;
  std::vector<Piece*> flying_;
};

}  // namespace offload::io
