// A part of a transfer, small enough for one request to the kernel, and the road it takes there.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

#include "io/buffer.h"
#include "io/transfer.h"

namespace offload::io {

// [Note: roads]
// Direct: file range and memory are aligned, the kernel moves the caller's bytes.
// Bounced: the range is aligned or, for a read, widened until it is; the bytes go through `bounce`. So do buffered
// reads of a part of a block where the file keeps sums. Buffered: the file does no direct I/O, or the piece is an edge
// of a write that covers a part of a block. The kernel then merges the edge with the block's other bytes under the
// file's own lock, so two writes that share a block lose nothing. Edges are written synchronously (RWF_DSYNC): their
// errors belong to this transfer, not to a later flush.
struct Piece {
  std::shared_ptr<Transfer> transfer;
  // What the transfer wants of this piece.
  char* data = nullptr;
  uint64_t offset = 0;
  uint64_t nbytes = 0;
  bool write = false;
  // What the kernel is asked for next.
  int fd = -1;
  char* at = nullptr;
  uint64_t from = 0;
  uint64_t left = 0;
  bool sync = false;

  bool direct = false;
  bool bounced = false;
  unsigned barren = 0;  // attempts in a row that moved nothing
  Buffer bounce;
  uint64_t bounce_from = 0;  // the file's bytes that `bounce` holds once a read is done
  uint64_t bounce_to = 0;

  std::chrono::steady_clock::time_point asked_at;
  uint64_t retries = 0;
  size_t flying_index = 0;  // the engine's
  bool contested = false;   // see [Note: contested] in sums.h
};

// Bytes of the next piece of a transfer at `offset` of a file: an edge up to the next block boundary, or as many whole
// blocks as `limit` holds, or the last edge.
uint64_t piece_bytes(const File& file, uint64_t offset, uint64_t nbytes, uint64_t limit);

// Chooses the piece's road and sets what the kernel is asked for first. Throws std::bad_alloc.
void aim(Piece& piece);

enum class Step { kAgain, kDone, kFailed };

struct Outcome {
  Step step;
  int code = 0;  // errno of a failure
  std::string detail = {};
};

// Takes in the kernel's answer, bytes moved or -errno: ask again for what is left, done, or failed.
Outcome advance(Piece& piece, int64_t result);

}  // namespace offload::io
