#include "pipeline/batch.h"

#include <algorithm>
#include <stdexcept>

namespace offload {

namespace {

// While it lives, somebody waits.
class Waiting {
 public:
  explicit Waiting(Signal& signal) : signal_(signal) {
    const std::lock_guard<std::mutex> lock(signal_.mutex);
    ++signal_.waiting;
    signal_.changed.notify_all();
  }
  ~Waiting() {
    const std::lock_guard<std::mutex> lock(signal_.mutex);
    --signal_.waiting;
  }
  Waiting(const Waiting&) = delete;
  Waiting& operator=(const Waiting&) = delete;

 private:
  Signal& signal_;
};

}  // namespace

Batch::Batch(std::vector<std::shared_ptr<const Job>> jobs, std::shared_ptr<Signal> signal)
    : jobs_(std::move(jobs)),
      signal_(std::move(signal)),
      gates_(jobs_.size(), Gate::kShut),
      lent_(jobs_.size(), nullptr),
      states_(jobs_.size(), State::kPending),
      unfinished_(jobs_.size()) {
  for (const auto& job : jobs_) {
    for (const auto* moves : {&job->reads, &job->writes}) {
      for (const Move& move : *moves) {
        if (std::find(engines_.begin(), engines_.end(), move.channel.engine) == engines_.end()) {
          engines_.push_back(move.channel.engine);
        }
      }
    }
  }
}

void Batch::check(const std::vector<Hyper>& hypers) const {
  for (const auto& job : jobs_) {
    for (const Segment& segment : job->segments) {
      if (segment.hyper >= hypers.size()) {
        throw std::invalid_argument("a job asks for hyper-parameters " + std::to_string(segment.hyper) + " of " +
                                    std::to_string(hypers.size()));
      }
      const Hyper& hyper = hypers[segment.hyper];
      if (hyper.active && hyper.rule != static_cast<int>(job->rule)) {
        throw std::invalid_argument("a job of rule " + std::to_string(static_cast<int>(job->rule)) +
                                    " is given hyper-parameters of rule " + std::to_string(hyper.rule));
      }
    }
  }
}

bool Batch::idle(size_t index) const {
  const Job& job = *jobs_[index];
  if (cancelled_ && gates_[index] != Gate::kOpen) return true;
  if (refresh_ || job.segments.empty()) return false;
  const auto& given = hypers(index);
  return std::all_of(job.segments.begin(), job.segments.end(),
                     [&given](const Segment& s) { return s.n == 0 || given[s.hyper].active == 0; });
}

bool Batch::open(size_t index) const { return begun_ && gates_[index] != Gate::kShut; }

void Batch::set(size_t index, State state) {
  const std::lock_guard<std::mutex> lock(mutex_);
  states_[index] = state;
  if (state == State::kWritten || state == State::kFailed) --unfinished_;
  changed_.notify_all();
}

void Batch::fail(size_t index, const io::IoError& error) {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (!error_) error_ = error;
  errors_.emplace(index, error);
}

bool Batch::over(size_t index, bool written) const {
  const State state = states_[index];
  return state == State::kWritten || state == State::kFailed || (state == State::kUpdated && !written);
}

bool Batch::reached(size_t index, bool written) const {
  const std::lock_guard<std::mutex> lock(mutex_);
  check_index(index);
  return over(index, written);
}

void Batch::check_index(size_t index) const {
  if (index >= states_.size()) throw std::out_of_range("no such job in the batch");
}

void Batch::wait() {
  while (!wait_for(patience())) {
  }
}

// Whether it is reached before the limit. `lock` is of mutex_.
template <class Reached>
bool Batch::await(std::unique_lock<std::mutex>& lock, std::chrono::milliseconds limit, Reached reached) {
  if (reached()) return true;
  lock.unlock();
  const Waiting waiting(*signal_);
  lock.lock();
  const bool there = changed_.wait_for(lock, limit, reached);
  lock.unlock();  // the pipeline's thread takes the two locks in the other order
  return there;
}

bool Batch::wait_for(std::chrono::milliseconds limit) {
  {
    std::unique_lock<std::mutex> lock(mutex_);
    if (await(lock, limit, [this] { return unfinished_ == 0; })) {
      if (!lock.owns_lock()) lock.lock();
      if (error_) throw io::IoError(*error_);
      return true;
    }
  }
  check_stuck();
  return false;
}

void Batch::wait_job(size_t index, bool written) {
  while (!wait_job_for(index, written, patience())) {
  }
}

bool Batch::wait_job_for(size_t index, bool written, std::chrono::milliseconds limit) {
  {
    std::unique_lock<std::mutex> lock(mutex_);
    check_index(index);
    if (await(lock, limit, [&] { return over(index, written); })) {
      if (!lock.owns_lock()) lock.lock();
      if (states_[index] == State::kFailed) throw io::IoError(errors_.at(index));
      return true;
    }
  }
  check_stuck();
  return false;
}

void Batch::check_stuck() const {
  for (const auto& engine : engines_) engine->check_stuck("an update");
}

std::chrono::milliseconds Batch::patience() const {
  std::chrono::milliseconds least(1000);
  for (const auto& engine : engines_) least = std::min(least, engine->patience());
  return least;
}

bool Batch::done() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return unfinished_ == 0;
}

bool Batch::failed() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return error_.has_value();
}

BatchStats Batch::stats() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return stats_;
}

}  // namespace offload
