#include "io/piece.h"

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "io/sums.h"

namespace offload::io {

namespace {

// The kernel may answer "try again"; an answer that never changes is an error, not a hang.
constexpr unsigned kBarrenAttemptsMax = 1000;

uint64_t round_down(uint64_t value, uint64_t step) { return value / step * step; }
uint64_t round_up(uint64_t value, uint64_t step) { return round_down(value + step - 1, step); }

void aim_buffered(Piece& piece, bool sync) {
  piece.direct = piece.bounced = false;
  piece.fd = piece.transfer->file().buffered_fd();
  piece.at = piece.data;
  piece.from = piece.offset;
  piece.left = piece.nbytes;
  piece.sync = sync;
}

// A read of a part of a block brings the whole, to be compared with its sum.
void aim_widened(Piece& piece) {
  const File& file = piece.transfer->file();
  const uint64_t start = round_down(piece.offset, Sums::kBlockBytes);
  const uint64_t end = std::min(round_up(piece.offset + piece.nbytes, Sums::kBlockBytes), file.size());
  if (start == piece.offset && end == piece.offset + piece.nbytes) return aim_buffered(piece, false);
  piece.bounce.reserve(end - start);
  piece.direct = false;
  piece.bounced = true;
  piece.fd = file.buffered_fd();
  piece.at = piece.bounce.data();
  piece.from = piece.bounce_from = start;
  piece.left = end - start;
  piece.sync = false;
}

// Through the page cache, for whatever direct I/O does not take.
void aim_around(Piece& piece, bool sync) {
  if (piece.transfer->file().sums() != nullptr && !piece.write) return aim_widened(piece);
  aim_buffered(piece, sync);
}

Outcome finished(Piece& piece, uint64_t moved) {
  if (piece.bounced && !piece.write) {
    piece.bounce_to = piece.from + moved;
    std::memcpy(piece.data, piece.bounce.data() + (piece.offset - piece.bounce_from), piece.nbytes);
  }
  return {Step::kDone};
}

Outcome refused(Piece& piece, int code) {
  if (code == EINTR || code == EAGAIN || code == ECANCELED) {
    ++piece.retries;
    if (++piece.barren <= kBarrenAttemptsMax) return {Step::kAgain};
    return {Step::kFailed, code, "again and again"};
  }
  if (piece.direct && code == EINVAL) {
    piece.transfer->file().refuse_direct();
    aim_around(piece, false);
    return {Step::kAgain};
  }
  if (piece.sync && code == EOPNOTSUPP) {
    piece.sync = false;
    return {Step::kAgain};
  }
  return {Step::kFailed, code, {}};
}

}  // namespace

uint64_t piece_bytes(const File& file, uint64_t offset, uint64_t nbytes, uint64_t limit) {
  const uint64_t block = file.block_bytes();
  const uint64_t into = offset % block;
  if (into != 0) return std::min(nbytes, block - into);
  if (nbytes < block) return nbytes;
  return std::min(round_down(nbytes, block), std::max(block, round_down(limit, block)));
}

void aim(Piece& piece) {
  const File& file = piece.transfer->file();
  const bool write = piece.write;
  piece.barren = 0;
  if (!file.direct()) return aim_around(piece, false);
  const uint64_t start = round_down(piece.offset, file.block_bytes());
  const uint64_t end = round_up(piece.offset + piece.nbytes, file.block_bytes());
  const bool whole = start == piece.offset && end == piece.offset + piece.nbytes;
  if (write && !whole) return aim_buffered(piece, true);
  piece.direct = true;
  piece.bounced = !whole || reinterpret_cast<uintptr_t>(piece.data) % file.memory_align() != 0;
  if (piece.bounced) {
    piece.bounce.reserve(end - start);
    if (write) std::memcpy(piece.bounce.data(), piece.data, piece.nbytes);
  }
  piece.fd = file.direct_fd();
  piece.at = piece.bounced ? piece.bounce.data() : piece.data;
  piece.from = piece.bounce_from = start;
  piece.left = end - start;
  piece.sync = false;
}

Outcome advance(Piece& piece, int64_t result) {
  const bool write = piece.write;
  if (result < 0) return refused(piece, static_cast<int>(-result));
  if (result == 0 && write) return {Step::kFailed, 0, "the kernel wrote nothing"};
  const File& file = piece.transfer->file();
  const uint64_t wanted = piece.offset + piece.nbytes;
  if (result == 0 && piece.bounced && piece.from >= wanted) return finished(piece, 0);
  if (result == 0) {
    return {Step::kFailed, 0,
            "the file ends at " + std::to_string(piece.from) + "; something cut it: use a directory of the run's own"};
  }
  piece.barren = 0;
  const uint64_t moved = std::min(static_cast<uint64_t>(result), piece.left);
  if (moved == piece.left) return finished(piece, moved);
  // A widened read may end at the end of the file, past all that is wanted; sums want all that there is.
  const uint64_t enough =
      file.sums() != nullptr ? std::max(wanted, std::min(piece.from + piece.left, file.size())) : wanted;
  if (piece.bounced && !write && piece.from + moved >= enough) return finished(piece, moved);
  ++piece.retries;
  // What follows a short direct transfer must be aligned again; less than a block of progress goes another way.
  const uint64_t step = piece.direct ? round_down(moved, file.block_bytes()) : moved;
  if (step == 0) {
    aim_around(piece, write);
    return {Step::kAgain};
  }
  piece.at += step;
  piece.from += step;
  piece.left -= step;
  return {Step::kAgain};
}

}  // namespace offload::io
