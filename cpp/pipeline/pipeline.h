// Streams chunks of state through a few frames of memory: read, update, write back, all three at once.
#pragma once

#include <sys/types.h>

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

#include "io/ring.h"
#include "pipeline/batch.h"
#include "pipeline/job.h"

namespace offload {

struct PipelineOptions {
  uint64_t frame_bytes = 0;
  int threads = 0;     // of an update; 0: default_threads()
  unsigned group = 0;  // frames written in one go; 0: half of the frames, at least one
  bool lazy = false;   // see [Note: lazy jobs]
};

// A job that is over, by its number: when its reads, its update and its writes began and ended; 0 where it had none.
struct Traced {
  using Time = std::chrono::steady_clock::time_point;
  size_t job = 0;
  Time read_from, read_to, update_from, update_to, write_from, write_to;
};

// [Note: groups]
// A disk that reads and writes at once often does less in all than one that does either for a while. Finished frames
// are therefore held until `group` of them can be written in one go; the reads that refill them queue behind. Held
// frames are written at once when no transfer is under way, so the disk is never idle for the grouping's sake.
//
// [Note: order]
// Jobs are updated in the order of submission, but a job that takes no frame may overtake, within its batch, jobs whose
// bytes have not arrived, and is overtaken by one whose bytes have when the disk would be idle. Jobs of one batch must
// not touch each other's memory. A read waits for all earlier writes to its bytes.
//
// [Note: lazy jobs]
// Where the cores that update are those that compute, updates that nobody waits for yet would only disturb. With
// `lazy`, jobs that take no frame run while somebody waits for any job, that is while those cores are idle, or when the
// pipeline ends. Jobs with a frame run as their bytes arrive, so that the disk is never idle.
//
// [Note: prepared batches]
// What an update needs besides its gradient is often known long before the gradients are. A batch may therefore be
// prepared: its jobs take free frames, in order, and read into them all that is not late; nothing is updated until it
// begins. Whoever writes to those bytes meanwhile cancels it, and waits for it, first. Only the last batch can be in
// this state, so the frames that it holds are never what an earlier one waits for.
//
// [Note: gated batches]
// Gradients come one by one. A batch may begin `gated`: each job is shut until it is opened, and settle() opens the
// rest with hyper-parameters of their own. Jobs should be given in the order in which they will be opened, as they take
// frames in it; any other order is right too. A job that is open and has no frame goes first for one. Where none is
// free and a shut job holds one, the last such job loses it, and is read again later. So frames are held by open jobs,
// which end by themselves, or can be had as soon as their reads have ended: a job that is open ends, whatever becomes
// of others. Only the last batch can be gated and not settled.
class Pipeline {
 public:
  // `frames`: addresses of frame_bytes each, on which direct I/O works best when they are multiples of 4096.
  // Throws std::invalid_argument. `keep` holds the frames.
  Pipeline(std::vector<char*> frames, PipelineOptions options, std::shared_ptr<void> keep = nullptr);
  ~Pipeline();  // finishes what was submitted; in a forked child nothing runs and nothing is waited for
  Pipeline(const Pipeline&) = delete;
  Pipeline& operator=(const Pipeline&) = delete;

  // Throws std::invalid_argument. Returns the job's number.
  size_t add_job(Job job);

  // Runs jobs, by number, after all that were submitted before. A job whose segments are all inactive is neither read
  // nor written, unless `refresh`: then out is written from the state as it is. After a failure no further job is
  // updated, and this and all later batches report it. Throws std::invalid_argument.
  std::shared_ptr<Batch> submit(const std::vector<size_t>& jobs, std::vector<Hyper> hypers, bool refresh = false);

  // As submit(), in two steps; see [Note: prepared batches]. begin() and cancel() throw std::invalid_argument for any
  // batch but the prepared one, prepare() and submit() while there is one. A cancelled batch changes nothing.
  std::shared_ptr<Batch> prepare(const std::vector<size_t>& jobs);
  void begin(const std::shared_ptr<Batch>& batch, std::vector<Hyper> hypers, bool refresh = false);
  void cancel(const std::shared_ptr<Batch>& batch);

  // As begin(), of a batch whose jobs are opened one by one; see [Note: gated batches]. open() and settle() throw
  // std::invalid_argument for any batch but the gated one. Until it is settled, prepare() and submit() throw, and
  // cancel() takes it too: what was opened goes on, the rest changes nothing.
  void gate(const std::shared_ptr<Batch>& batch, std::vector<Hyper> hypers);
  // `late`: memory that has the bytes of the job's only late read, which is then left out; it is the job's until the
  // job is updated, or has failed.
  void open(const std::shared_ptr<Batch>& batch, size_t index, char* late = nullptr);
  // Whether a job of a batch that is not over has a frame, so that it is updated soon once it is open.
  bool has_frame(const std::shared_ptr<Batch>& batch, size_t index) const;
  void settle(const std::shared_ptr<Batch>& batch, std::vector<Hyper> hypers);

  const PipelineOptions& options() const { return options_; }
  size_t frames() const { return frames_.size(); }
  bool foreign() const;
  // How long its thread has had nothing to do but wait for reads, and for writes, so far.
  std::pair<double, double> waited() const;
  // From here on the newest `most` jobs are noted, 0: none; and what was, oldest first, with how many gave way.
  void trace(size_t most);
  std::pair<std::vector<Traced>, uint64_t> traced() const;
  // Finishes what was submitted and takes no more; false when a device is stuck and it cannot be finished.
  bool finish();

 private:
  // A job of a batch on its way. kWaiting: no frame yet. kReading: bytes arrive. kPrimed: all but what is late has
  // arrived. kReady: may be updated. kHeld: updated, to be written with its group. kWriting: bytes leave.
  enum class Stage { kWaiting, kReading, kPrimed, kReady, kHeld, kWriting };
  struct Run {
    std::shared_ptr<Batch> batch;
    size_t index;
    const Job* job;
    uint64_t order;
    bool idle = false;      // nothing to do
    bool complete = false;  // nothing remains to be read once what flies has arrived
    Stage stage = Stage::kWaiting;
    int frame = -1;
    size_t moves_left = 0;
    bool failed = false;
    Traced times;

    bool open() const { return batch->open(index); }
    char* lent() const { return batch->lent_[index]; }
    char* memory(const std::vector<char*>& frames) const { return frame < 0 ? nullptr : frames[frame]; }
  };
  using RunPtr = std::shared_ptr<Run>;
  using Lock = std::unique_lock<std::mutex>;

  std::shared_ptr<Batch> make(const std::vector<size_t>& jobs) const;
  static void check_is(const std::shared_ptr<Batch>& batch, const std::shared_ptr<Batch>& one, const char* what);
  void queue(const std::shared_ptr<Batch>& batch);
  void set_off(std::shared_ptr<Batch>& batch, Batch::Gate gate);
  void conduct();
  bool admit(Lock& lock);
  std::deque<RunPtr>::iterator next_unread();
  bool find_frame();
  bool resume(Lock& lock);
  bool flush(Lock& lock);
  bool step(Lock& lock);
  void rest(Lock& lock);
  std::pair<double, double> waited_now() const;
  RunPtr choose() const;
  void read(Lock& lock, const RunPtr& run, bool late);
  bool must_wait(const Run& run) const;
  void start(Lock& lock, const RunPtr& run, const std::vector<Move>& moves, bool write);
  void moved(const RunPtr& run, const io::Transfer& transfer);
  void arrive(const RunPtr& run);
  void fail(const RunPtr& run, const io::IoError& error);
  bool abandon_all();
  void abandon(const RunPtr& run);
  void leave_frame(Run& run);
  void note(Run& run);
  bool empty() const;

  const std::vector<char*> frames_;
  const std::shared_ptr<void> keep_;
  const PipelineOptions options_;
  const pid_t pid_;
  ThreadPool pool_;

  const std::shared_ptr<Signal> signal_;  // the last callback lets go of it
  std::vector<std::shared_ptr<const Job>> jobs_;
  std::vector<int> free_frames_;
  std::deque<RunPtr> unread_;     // framed, kWaiting
  std::deque<RunPtr> framed_;     // framed, not yet updated, in order
  std::deque<RunPtr> frameless_;  // not yet updated, in order
  std::deque<RunPtr> held_;
  std::vector<RunPtr> writing_;
  uint64_t order_ = 0;
  size_t reads_flying_ = 0;
  size_t writes_flying_ = 0;
  enum class Rest { kNone, kRead, kWrite };
  Rest rest_ = Rest::kNone;
  std::chrono::steady_clock::time_point rest_since_;
  double waited_read_seconds_ = 0;
  double waited_write_seconds_ = 0;
  Ring<Traced> traced_;
  std::shared_ptr<Batch> prepared_, gated_;  // at most one of them
  std::optional<io::IoError> broken_;
  bool closing_ = false;
  bool ended_ = false;
  std::thread* thread_ = nullptr;  // leaked in a forked child, where it does not exist
};

// Deletes a pipeline, but neither in a forked child nor when it cannot finish: a stuck device may still write to
// frames.
void discard(Pipeline* pipeline);

}  // namespace offload
