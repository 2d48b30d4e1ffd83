#include "io/threads.h"

#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>

namespace offload::io {

namespace {

constexpr unsigned kThreadsMax = 32;

}  // namespace

ThreadEngine::ThreadEngine(EngineOptions options) : ThreadEngine(options, Deferred{}) { start(); }

ThreadEngine::ThreadEngine(EngineOptions options, Deferred) : Engine(options) {}

void ThreadEngine::start() {
  const unsigned count = std::min(options().queue_depth, kThreadsMax);
  threads_.reserve(count);
  try {
    for (unsigned i = 0; i < count; ++i) threads_.emplace_back([this] { work(); });
  } catch (const std::system_error& error) {
    close();
    throw Unavailable(std::string("cannot start I/O threads: ") + error.what());
  }
}

void ThreadEngine::work() {
  Piece piece;
  while (take_waiting(piece)) {
    Outcome outcome{Step::kAgain};
    while (outcome.step == Step::kAgain) outcome = advance(piece, attempt(piece));
    answered(piece);
    finish(piece, outcome);
    piece.bounce.release();
  }
}

int64_t ThreadEngine::attempt(const Piece& piece) {
  const iovec part{piece.at, piece.left};
  const auto from = static_cast<off_t>(piece.from);
  const ssize_t moved = piece.write ? ::pwritev2(piece.fd, &part, 1, from, piece.sync ? RWF_DSYNC : 0)
                                    : ::preadv2(piece.fd, &part, 1, from, 0);
  return moved >= 0 ? moved : -errno;
}

void ThreadEngine::stop() {
  for (std::thread& thread : threads_) thread.join();
  threads_.clear();
}

}  // namespace offload::io
