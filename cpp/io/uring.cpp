#include "io/uring.h"

#ifdef OFFLOAD_HAVE_URING

#include <liburing.h>
#include <sys/eventfd.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <array>
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

constexpr unsigned kFilesMax = 16;
constexpr unsigned kRegionsMax = 64;
constexpr uint64_t kRegionBytesMax = 1u << 30;   // the kernel's bound of one registered buffer
constexpr uint64_t kPieceBytesLarge = 1u << 16;  // of which one is worth a system call of its own

class UringEngine final : public Engine {
 public:
  // One piece more than may be asked at once: the one whose sums are computed.
  explicit UringEngine(EngineOptions options) : Engine(options), pieces_(options.queue_depth + 1) {
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

  bool register_memory(void* data, uint64_t nbytes, std::shared_ptr<void> keep) override {
    if (foreign()) return false;
    Order order{static_cast<char*>(data), nbytes, std::move(keep), {}};
    std::future<bool> done = order.done.get_future();
    {
      const std::lock_guard<std::mutex> lock(orders_mutex_);
      if (orders_closed_) return false;
      orders_.push_back(std::move(order));
    }
    wake();
    return done.get();
  }

 private:
  // Memory to be registered; only the ring's own thread may.
  struct Order {
    char* data;
    uint64_t nbytes;
    std::shared_ptr<void> keep;
    std::promise<bool> done;
  };
  struct Region {
    char* begin;
    char* end;
    std::shared_ptr<void> keep;  // another mapping at this address would not be what the kernel knows
  };
  struct Slot {
    uint64_t id = 0;
    bool direct = false;
    std::weak_ptr<File> file;
  };

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
#ifdef OFFLOAD_URING_REGISTERS
    files_ = ::io_uring_register_files_sparse(&ring_, kFilesMax) == 0;
    buffers_ = ::io_uring_register_buffers_sparse(&ring_, kRegionsMax) == 0;
#endif
    listen();
    while (true) {
      carry_out(false);
      refill();
      if (free_.size() == pieces_.size()) {
        if (closing()) break;
        for (Piece& idle : pieces_) idle.bounce.release();
      }
      // Interrupted or short of memory: what was not submitted stays queued for the next round.
      ::io_uring_submit_and_wait(&ring_, 1);
      reap();
    }
    carry_out(true);
    ::io_uring_queue_exit(&ring_);
    regions_.clear();
  }

  bool refill() {
    bool asked = false;
    Piece* piece = nullptr;
    while (asked_ < options().queue_depth && !free_.empty() && take(*(piece = free_.back()))) {
      free_.pop_back();
      ++asked_;
      ask(*piece);
      asked = true;
    }
    return asked;
  }

  void carry_out(bool last) {
    std::vector<Order> orders;
    {
      const std::lock_guard<std::mutex> lock(orders_mutex_);
      orders.swap(orders_);
      orders_closed_ = last;
    }
    for (Order& order : orders) order.done.set_value(!last && add_regions(order));
  }

  bool add_regions(const Order& order) {
    if (!buffers_) return false;
    for (uint64_t at = 0; at < order.nbytes; at += kRegionBytesMax) {
      if (regions_.size() == kRegionsMax) return false;
      iovec part{order.data + at, std::min(kRegionBytesMax, order.nbytes - at)};
#ifdef OFFLOAD_URING_REGISTERS
      const __u64 tag = 0;
      const auto index = static_cast<unsigned>(regions_.size());
      // Refused where RLIMIT_MEMLOCK is too low or the memory is not of a kind that can be pinned.
      if (::io_uring_register_buffers_update_tag(&ring_, index, &part, &tag, 1) < 0) return false;
#endif
      regions_.push_back({order.data + at, order.data + at + part.iov_len, order.keep});
    }
    return true;
  }

  int region_of(const char* begin, uint64_t nbytes) const {
    for (size_t i = 0; i < regions_.size(); ++i) {
      if (begin >= regions_[i].begin && begin + nbytes <= regions_[i].end) return static_cast<int>(i);
    }
    return -1;
  }

  // The slot in which the kernel knows the piece's file, -1 where it knows it by the descriptor alone.
  int slot_of(const Piece& piece) {
    if (!files_) return -1;
    const std::shared_ptr<File>& file = piece.transfer->shared_file();
    int spare = -1;
    for (size_t i = 0; i < slots_.size(); ++i) {
      if (slots_[i].id == file->id() && slots_[i].direct == piece.direct) return static_cast<int>(i);
      if (spare < 0 && slots_[i].file.expired()) spare = static_cast<int>(i);
    }
    if (spare < 0) return -1;
    int fd = piece.fd;
    if (::io_uring_register_files_update(&ring_, static_cast<unsigned>(spare), &fd, 1) < 0) return -1;
    slots_[static_cast<size_t>(spare)] = {file->id(), piece.direct, file};
    return spare;
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
    --asked_;
    answered(piece);
    // Its sums take a while, in which the device should have all it can take.
    const bool slow = piece.nbytes >= kPieceBytesLarge && piece.transfer->file().sums() != nullptr;
    if (slow && refill()) ::io_uring_submit(&ring_);
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
    const int slot = slot_of(piece);
    const int fd = slot < 0 ? piece.fd : slot;
    const int region = region_of(piece.at, piece.left);
    io_uring_sqe* sqe = entry();
    const auto length = static_cast<unsigned>(piece.left);
    if (piece.write && region >= 0) {
      ::io_uring_prep_write_fixed(sqe, fd, piece.at, length, piece.from, region);
    } else if (piece.write) {
      ::io_uring_prep_write(sqe, fd, piece.at, length, piece.from);
    } else if (region >= 0) {
      ::io_uring_prep_read_fixed(sqe, fd, piece.at, length, piece.from, region);
    } else {
      ::io_uring_prep_read(sqe, fd, piece.at, length, piece.from);
    }
    if (piece.sync) sqe->rw_flags = RWF_DSYNC;
    if (slot >= 0) sqe->flags |= IOSQE_FIXED_FILE;
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
  bool files_ = false;    // the kernel lets files be registered
  bool buffers_ = false;  // and memory
  std::array<Slot, kFilesMax> slots_;
  std::vector<Region> regions_;
  std::mutex orders_mutex_;
  std::vector<Order> orders_;
  bool orders_closed_ = false;
  std::vector<Piece> pieces_;
  std::vector<Piece*> free_;
  unsigned asked_ = 0;  // pieces that the kernel has
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
