#include "io/uring.h"

#ifdef OFFLOAD_HAVE_URING

#include <liburing.h>
#include <sys/eventfd.h>
#include <sys/uio.h>
#include <unistd.h>

#include <cerrno>
#include <future>
#include <thread>
#include <vector>

namespace offload::io {

namespace {

// Completions are handled by the ring's own thread when it asks for them, so compute threads are never interrupted.
constexpr unsigned kFlagChoices[] = {
#if defined(IORING_SETUP_DEFER_TASKRUN) && defined(IORING_SETUP_SINGLE_ISSUER)
    IORING_SETUP_CLAMP | IORING_SETUP_SINGLE_ISSUER | IORING_SETUP_DEFER_TASKRUN,
#endif
    IORING_SETUP_CLAMP, 0};

class UringEngine final : public Engine {
 public:
  explicit UringEngine(EngineOptions options) : Engine(options), pieces_(options.queue_depth) {
    event_fd_ = ::eventfd(0, EFD_CLOEXEC);
    if (event_fd_ < 0) throw Unavailable("no eventfd for io_uring: " + errno_text(errno));
    for (Piece& piece : pieces_) free_.push_back(&piece);
    std::promise<int> ready;
    std::future<int> code = ready.get_future();
    try {
      thread_ = std::thread([this, &ready] { run(ready); });
    } catch (const std::system_error& error) {
      ::close(event_fd_);
      throw Unavailable(std::string("cannot start the io_uring thread: ") + error.what());
    }
    const int failed = code.get();
    if (failed != 0) {
      thread_.join();
      ::close(event_fd_);
      throw Unavailable("the kernel refuses io_uring: " + errno_text(failed));
    }
  }

  ~UringEngine() override {
    close();
    ::close(event_fd_);
  }

  const char* kind() const override { return "io_uring"; }

 private:
  void wake() override {
    const uint64_t one = 1;
    while (::write(event_fd_, &one, sizeof one) < 0 && errno == EINTR) {
    }
  }

  void stop() override {
    wake();
    thread_.join();
  }

  int open_ring() {
    int code = -EINVAL;
    for (const unsigned flags : kFlagChoices) {
      // One entry more than pieces: the eventfd's read.
      code = ::io_uring_queue_init(options().queue_depth + 1, &ring_, flags);
      if (code != -EINVAL) break;
    }
    return -code;
  }

  void run(std::promise<int>& ready) {
    const int failed = open_ring();
    ready.set_value(failed);
    if (failed != 0) return;
    listen();
    while (true) {
      Piece* piece = nullptr;
      while (!free_.empty() && take(*(piece = free_.back()))) {
        free_.pop_back();
        ask(*piece);
      }
      if (free_.size() == pieces_.size()) {
        if (closing()) break;
        for (Piece& idle : pieces_) idle.bounce.release();
      }
      // Interrupted or short of memory: what was not submitted stays queued for the next round.
      ::io_uring_submit_and_wait(&ring_, 1);
      reap();
    }
    ::io_uring_queue_exit(&ring_);
  }

  void reap() {
    io_uring_cqe* found[64];
    unsigned count = 0;
    while ((count = ::io_uring_peek_batch_cqe(&ring_, found, 64)) != 0) {
      for (unsigned i = 0; i < count; ++i) {
        auto* piece = static_cast<Piece*>(::io_uring_cqe_get_data(found[i]));
        const int result = found[i]->res;
        ::io_uring_cqe_seen(&ring_, found[i]);
        if (piece == nullptr) {
          listen();
        } else {
          answer(*piece, result);
        }
      }
    }
  }

  void answer(Piece& piece, int result) {
    const Outcome outcome = advance(piece, result);
    if (outcome.step == Step::kAgain) return ask(piece);
    finish(piece, outcome);
    free_.push_back(&piece);
  }

  io_uring_sqe* entry() {
    io_uring_sqe* sqe = ::io_uring_get_sqe(&ring_);
    while (sqe == nullptr) {  // all entries hold requests that the kernel has not taken yet
      ::io_uring_submit(&ring_);
      sqe = ::io_uring_get_sqe(&ring_);
    }
    return sqe;
  }

  void ask(Piece& piece) {
    io_uring_sqe* sqe = entry();
    const auto length = static_cast<unsigned>(piece.left);
    if (piece.transfer->is_write()) {
      ::io_uring_prep_write(sqe, piece.fd, piece.at, length, piece.from);
      if (piece.sync) sqe->rw_flags = RWF_DSYNC;
    } else {
      ::io_uring_prep_read(sqe, piece.fd, piece.at, length, piece.from);
    }
    ::io_uring_sqe_set_data(sqe, &piece);
  }

  void listen() {
    io_uring_sqe* sqe = entry();
    ::io_uring_prep_read(sqe, event_fd_, &event_count_, sizeof event_count_, 0);
    ::io_uring_sqe_set_data(sqe, nullptr);
  }

  io_uring ring_;
  int event_fd_ = -1;
  uint64_t event_count_ = 0;
  std::vector<Piece> pieces_;
  std::vector<Piece*> free_;
  std::thread thread_;
};

}  // namespace

std::unique_ptr<Engine> make_uring_engine(EngineOptions options) { return std::make_unique<UringEngine>(options); }

}  // namespace offload::io

#else

namespace offload::io {

std::unique_ptr<Engine> make_uring_engine(EngineOptions) { throw Unavailable("built without liburing"); }

}  // namespace offload::io

#endif
