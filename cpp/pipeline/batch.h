// Jobs that run together: what became of each, and where the time went.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <vector>

#include "io/error.h"
#include "pipeline/job.h"

namespace offload {

struct BatchStats {
  double read_wait_seconds = 0;   // nothing to update because reads were under way
  double write_wait_seconds = 0;  // nothing to update because frames or extents were still being written
  double compute_seconds = 0;
  uint64_t bytes_read = 0;
  uint64_t bytes_written = 0;
};

// Between a pipeline's thread and whoever waits for it. Outlives the pipeline.
struct Signal {
  std::mutex mutex;
  std::condition_variable changed;
  int waiting = 0;  // threads inside a batch's wait
};

class Batch {
 public:
  // kUpdated: the arrays in memory are final. kWritten: its bytes are in the files too.
  enum class State { kPending, kUpdated, kWritten, kFailed };

  Batch(std::vector<std::shared_ptr<const Job>> jobs, std::shared_ptr<Signal> signal);

  // Each throws io::IoError if what it waits for did not happen: a job's own error, else the one that ended the stream;
  // or one that says what is pending when a device is stuck: the batch is then still under way and can be waited for
  // again.
  void wait();
  void wait_job(size_t index, bool written);
  // As above, giving up after `limit`: false when not yet there.
  bool wait_for(std::chrono::milliseconds limit);
  bool wait_job_for(size_t index, bool written, std::chrono::milliseconds limit);

  bool done() const;
  bool failed() const;  // of any job
  // Whether wait_job() would return, or throw, at once.
  bool reached(size_t index, bool written) const;
  size_t size() const { return jobs_.size(); }
  BatchStats stats() const;

 private:
  friend class Pipeline;

  void check(const std::vector<Hyper>& hypers) const;  // throws std::invalid_argument where they do not suit the jobs
  bool idle(size_t index) const;                       // nothing to do for the job: see Pipeline::submit
  bool open(size_t index) const;                       // the job may be read whole and updated
  const std::vector<Hyper>& hypers(size_t index) const { return gates_[index] == Gate::kLate ? late_hypers_ : hypers_; }
  void set(size_t index, State state);
  void fail(size_t index, const io::IoError& error);
  bool over(size_t index, bool written) const;
  void check_index(size_t index) const;
  template <class Reached>
  bool await(std::unique_lock<std::mutex>& lock, std::chrono::milliseconds limit, Reached reached);
  void check_stuck() const;
  std::chrono::milliseconds patience() const;

  const std::vector<std::shared_ptr<const Job>> jobs_;
  const std::shared_ptr<Signal> signal_;
  // kShut: not to be updated yet. kLate: opened by Pipeline::settle(), and so with its hyper-parameters.
  enum class Gate : uint8_t { kShut, kOpen, kLate };

  // Under the pipeline's mutex until begun (late_hypers_: until settled), constant from then on.
  std::vector<Hyper> hypers_;
  std::vector<Hyper> late_hypers_;
  bool refresh_ = false;
  bool begun_ = false;
  bool cancelled_ = false;                            // what was not opened by then changes nothing
  std::vector<Gate> gates_;                           // under the pipeline's mutex
  std::vector<char*> lent_;                           // as gates_: by job, see Pipeline::open()
  std::vector<std::shared_ptr<io::Engine>> engines_;  // each once

  mutable std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<State> states_;
  size_t unfinished_;
  std::optional<io::IoError> error_;      // the first
  std::map<size_t, io::IoError> errors_;  // each failed job's first
  BatchStats stats_;
};

}  // namespace offload
