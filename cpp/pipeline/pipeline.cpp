#include "pipeline/pipeline.h"

#include <unistd.h>

#include <algorithm>
#include <iterator>
#include <stdexcept>
#include <string>
#include <tuple>

namespace offload {

namespace {

constexpr std::chrono::milliseconds kPatience(250);

using Clock = std::chrono::steady_clock;

double seconds_since(Clock::time_point start) { return std::chrono::duration<double>(Clock::now() - start).count(); }

bool overlap(const Move& a, const Move& b) {
  return a.channel.file == b.channel.file && a.file_offset < b.file_offset + b.nbytes &&
         b.file_offset < a.file_offset + a.nbytes;
}

bool touches(const std::vector<Move>& moves, const std::vector<Move>& writes) {
  return std::any_of(moves.begin(), moves.end(), [&](const Move& move) {
    return std::any_of(writes.begin(), writes.end(), [&](const Move& write) { return overlap(move, write); });
  });
}

PipelineOptions checked(PipelineOptions options, size_t frames) {
  if (frames != 0 && options.frame_bytes == 0) throw std::invalid_argument("pipeline: frames of no bytes");
  if (options.threads < 0) throw std::invalid_argument("pipeline: threads must not be negative");
  if (options.group == 0) options.group = static_cast<unsigned>(std::max<size_t>(1, frames / 2));
  return options;
}

}  // namespace

Pipeline::Pipeline(std::vector<char*> frames, PipelineOptions options, std::shared_ptr<void> keep)
    : frames_(std::move(frames)),
      keep_(std::move(keep)),
      options_(checked(options, frames_.size())),
      pid_(::getpid()),
      pool_(options.threads),
      signal_(std::make_shared<Signal>()) {
  for (size_t i = frames_.size(); i != 0; --i) free_frames_.push_back(static_cast<int>(i - 1));
  thread_ = new std::thread([this] { conduct(); });
}

Pipeline::~Pipeline() {
  if (foreign()) return;
  while (!finish()) {
  }
  thread_->join();
  delete thread_;
}

bool Pipeline::finish() {
  Lock lock(signal_->mutex);
  closing_ = true;
  for (auto* batch : {&prepared_, &gated_}) {
    if (!*batch) continue;
    (*batch)->cancelled_ = true;
    set_off(*batch, Batch::Gate::kLate);
  }
  signal_->changed.notify_all();
  while (!signal_->changed.wait_for(lock, kPatience, [this] { return ended_; })) {
    try {
      for (const auto& job : jobs_) {
        for (const Move& move : job->reads) move.channel.engine->check_stuck({});
        for (const Move& move : job->writes) move.channel.engine->check_stuck({});
      }
    } catch (const io::IoError&) {
      return false;
    }
  }
  return true;
}

bool Pipeline::foreign() const { return ::getpid() != pid_; }

size_t Pipeline::add_job(Job job) {
  check(job, options_.frame_bytes);
  if (job.needs_frame() && frames_.empty()) throw std::invalid_argument("pipeline job: it moves bytes without a frame");
  const Lock lock(signal_->mutex);
  job.number = jobs_.size();
  jobs_.push_back(std::make_shared<const Job>(std::move(job)));
  return jobs_.size() - 1;
}

std::shared_ptr<Batch> Pipeline::submit(const std::vector<size_t>& jobs, std::vector<Hyper> hypers, bool refresh) {
  const Lock lock(signal_->mutex);
  auto batch = make(jobs);
  batch->check(hypers);
  batch->hypers_ = std::move(hypers);
  batch->refresh_ = refresh;
  batch->begun_ = true;
  batch->gates_.assign(batch->size(), Batch::Gate::kOpen);
  queue(batch);
  return batch;
}

std::shared_ptr<Batch> Pipeline::prepare(const std::vector<size_t>& jobs) {
  const Lock lock(signal_->mutex);
  prepared_ = make(jobs);
  queue(prepared_);
  return prepared_;
}

void Pipeline::begin(const std::shared_ptr<Batch>& batch, std::vector<Hyper> hypers, bool refresh) {
  const Lock lock(signal_->mutex);
  check_is(batch, prepared_, "prepared");
  batch->check(hypers);
  batch->hypers_ = std::move(hypers);
  batch->refresh_ = refresh;
  set_off(prepared_, Batch::Gate::kOpen);
}

void Pipeline::cancel(const std::shared_ptr<Batch>& batch) {
  const Lock lock(signal_->mutex);
  auto& one = gated_ ? gated_ : prepared_;
  check_is(batch, one, "prepared");
  batch->cancelled_ = true;
  set_off(one, Batch::Gate::kLate);
}

void Pipeline::gate(const std::shared_ptr<Batch>& batch, std::vector<Hyper> hypers) {
  const Lock lock(signal_->mutex);
  check_is(batch, prepared_, "prepared");
  batch->check(hypers);
  batch->hypers_ = std::move(hypers);
  batch->begun_ = true;
  gated_ = std::move(prepared_);
  prepared_.reset();
}

void Pipeline::open(const std::shared_ptr<Batch>& batch, size_t index, char* late) {
  const Lock lock(signal_->mutex);
  check_is(batch, gated_, "gated");
  batch->check_index(index);
  if (batch->gates_[index] == Batch::Gate::kOpen) throw std::invalid_argument("pipeline: this job is open already");
  if (late != nullptr && batch->jobs_[index]->late_read() == nullptr)
    throw std::invalid_argument("pipeline: memory is lent to a job that has not one late read");
  batch->lent_[index] = late;
  batch->gates_[index] = Batch::Gate::kOpen;
  signal_->changed.notify_all();
}

bool Pipeline::has_frame(const std::shared_ptr<Batch>& batch, size_t index) const {
  const Lock lock(signal_->mutex);
  return std::any_of(framed_.begin(), framed_.end(),
                     [&](const RunPtr& run) { return run->batch == batch && run->index == index && run->frame >= 0; });
}

void Pipeline::settle(const std::shared_ptr<Batch>& batch, std::vector<Hyper> hypers) {
  const Lock lock(signal_->mutex);
  check_is(batch, gated_, "gated");
  batch->check(hypers);
  batch->late_hypers_ = std::move(hypers);
  set_off(gated_, Batch::Gate::kLate);
}

void Pipeline::check_is(const std::shared_ptr<Batch>& batch, const std::shared_ptr<Batch>& one, const char* what) {
  if (!batch || batch != one)
    throw std::invalid_argument(std::string("pipeline: this batch is not the ") + what + " one");
}

std::shared_ptr<Batch> Pipeline::make(const std::vector<size_t>& jobs) const {
  if (foreign()) throw std::runtime_error("a pipeline cannot be used in a forked child; make one there");
  if (prepared_) throw std::invalid_argument("pipeline: a batch is prepared; begin or cancel it first");
  if (gated_) throw std::invalid_argument("pipeline: a batch is gated; settle or cancel it first");
  std::vector<std::shared_ptr<const Job>> chosen;
  chosen.reserve(jobs.size());
  for (const size_t job : jobs) {
    if (job >= jobs_.size()) throw std::invalid_argument("pipeline: no job " + std::to_string(job));
    chosen.push_back(jobs_[job]);
  }
  return std::make_shared<Batch>(std::move(chosen), signal_);
}

void Pipeline::queue(const std::shared_ptr<Batch>& batch) {
  for (size_t i = 0; i < batch->size(); ++i) {
    auto run = std::make_shared<Run>();
    run->batch = batch;
    run->index = i;
    run->job = batch->jobs_[i].get();
    run->order = order_++;
    run->idle = batch->begun_ && batch->idle(i);
    if (run->job->needs_frame() && !run->idle) {
      unread_.push_back(run);
      framed_.push_back(std::move(run));
    } else {
      frameless_.push_back(std::move(run));
    }
  }
  signal_->changed.notify_all();
}

// Jobs of the prepared or gated batch that are shut go through `gate`. Idle ones that have no frame yet will take none.
void Pipeline::set_off(std::shared_ptr<Batch>& one, Batch::Gate gate) {
  const auto batch = std::move(one);
  one.reset();
  batch->begun_ = true;
  for (Batch::Gate& g : batch->gates_) g = g == Batch::Gate::kShut ? gate : g;
  const auto of_batch = [&batch](const RunPtr& run) { return run->batch == batch; };
  const auto leaves = [&](const RunPtr& run) { return of_batch(run) && run->idle && run->stage == Stage::kWaiting; };
  for (const auto* runs : {&framed_, &frameless_}) {
    for (const RunPtr& run : *runs) run->idle = of_batch(run) ? batch->idle(run->index) : run->idle;
  }
  std::copy_if(framed_.begin(), framed_.end(), std::back_inserter(frameless_), leaves);
  for (auto* runs : {&unread_, &framed_}) runs->erase(std::remove_if(runs->begin(), runs->end(), leaves), runs->end());
  signal_->changed.notify_all();
}

void Pipeline::conduct() {
  Lock lock(signal_->mutex);
  while (true) {
    bool worked = broken_ ? abandon_all() : admit(lock);
    worked = resume(lock) || worked;
    worked = flush(lock) || worked;
    worked = step(lock) || worked;
    if (worked) continue;
    if (closing_ && empty()) break;
    rest(lock);
  }
  ended_ = true;
  signal_->changed.notify_all();
}

bool Pipeline::empty() const { return framed_.empty() && frameless_.empty() && held_.empty() && writing_.empty(); }

// Gives free frames to the next jobs and starts their reads.
bool Pipeline::admit(Lock& lock) {
  bool worked = false;
  while (!broken_ && !unread_.empty()) {
    const auto next = next_unread();
    const RunPtr run = *next;
    if (must_wait(*run) || (free_frames_.empty() && !(run->open() && find_frame()))) break;
    unread_.erase(std::find(unread_.begin(), unread_.end(), run));
    run->frame = free_frames_.back();
    free_frames_.pop_back();
    read(lock, run, run->open());
    worked = true;
  }
  return worked;
}

// Of the jobs without a frame the first that is open, else the first. Those of earlier batches are all open.
std::deque<Pipeline::RunPtr>::iterator Pipeline::next_unread() {
  const auto open = std::find_if(unread_.begin(), unread_.end(), [](const RunPtr& run) { return run->open(); });
  return open == unread_.end() ? unread_.begin() : open;
}

// Takes the frame of the last job that is shut and is not being read; false if there is none. See [Note: gated
// batches].
bool Pipeline::find_frame() {
  const auto shut = std::find_if(framed_.rbegin(), framed_.rend(), [](const RunPtr& run) {
    return run->frame >= 0 && !run->open() && run->stage != Stage::kReading;
  });
  if (shut == framed_.rend()) return false;
  const RunPtr run = *shut;
  leave_frame(*run);
  run->stage = Stage::kWaiting;
  const auto after = [&run](const RunPtr& other) { return other->order > run->order; };
  unread_.insert(std::find_if(unread_.begin(), unread_.end(), after), run);
  return true;
}

// Reads what is late of jobs that have all else, once they are open.
bool Pipeline::resume(Lock& lock) {
  bool worked = false;
  while (!broken_) {
    const auto primed = std::find_if(framed_.begin(), framed_.end(),
                                     [](const RunPtr& run) { return run->stage == Stage::kPrimed && run->open(); });
    if (primed == framed_.end()) break;
    const RunPtr run = *primed;
    if (run->idle) {
      run->stage = Stage::kReady;
    } else {
      read(lock, run, true);
    }
    worked = true;
  }
  return worked;
}

// Reads what the job has not read yet, `late` what is late too.
void Pipeline::read(Lock& lock, const RunPtr& run, bool late) {
  std::vector<Move> moves;
  bool all = true;
  for (const Move& move : run->job->reads) {
    if (move.late && run->lent() != nullptr) continue;  // it is there
    if (move.late && !late) all = false;
    if (move.late ? late : run->stage == Stage::kWaiting) moves.push_back(move);
  }
  if (run->stage == Stage::kWaiting) run->times.read_from = Clock::now();
  run->stage = Stage::kReading;
  run->complete = all;
  start(lock, run, moves, false);
}

// Whether bytes of the job are still to be written by an earlier one.
bool Pipeline::must_wait(const Run& run) const {
  const auto clash = [&run](const RunPtr& other) {
    return other->order < run.order &&
           (touches(run.job->reads, other->job->writes) || touches(run.job->writes, other->job->writes));
  };
  return std::any_of(writing_.begin(), writing_.end(), clash) || std::any_of(held_.begin(), held_.end(), clash) ||
         std::any_of(framed_.begin(), framed_.end(),
                     [&](const RunPtr& other) { return other->frame >= 0 && clash(other); });
}

// Starts writing the held frames when there is a group of them, or nothing better to do for the disk.
bool Pipeline::flush(Lock& lock) {
  if (held_.empty()) return false;
  const bool last = unread_.empty() && reads_flying_ == 0;
  const bool disk_idle = reads_flying_ + writes_flying_ == 0;
  if (held_.size() < options_.group && !last && !disk_idle && !broken_) return false;
  while (!held_.empty()) {
    const RunPtr run = held_.front();
    held_.pop_front();
    run->stage = Stage::kWriting;
    run->times.write_from = Clock::now();
    writing_.push_back(run);
    start(lock, run, run->job->writes, true);
  }
  return true;
}

Pipeline::RunPtr Pipeline::choose() const {
  const auto first = [](const std::deque<RunPtr>& runs) {
    const auto open = std::find_if(runs.begin(), runs.end(), [](const RunPtr& run) { return run->open(); });
    return open == runs.end() ? nullptr : *open;
  };
  const auto holder =
      std::find_if(framed_.begin(), framed_.end(), [](const RunPtr& run) { return run->frame >= 0 && run->open(); });
  const RunPtr framed = holder == framed_.end() ? first(framed_) : *holder;  // one without might wait for its frame
  RunPtr frameless = first(frameless_);
  if (frameless && !frameless->idle && options_.lazy && signal_->waiting == 0 && !closing_) frameless = nullptr;
  const bool ready = framed && framed->stage == Stage::kReady;
  if (!framed || !frameless) return ready ? framed : frameless;
  const bool together = framed->batch == frameless->batch;
  const bool disk_idle = reads_flying_ + writes_flying_ == 0;
  if (ready && (framed->order < frameless->order || (together && disk_idle))) return framed;
  if (together || frameless->order < framed->order) return frameless;
  return nullptr;
}

// Updates one job.
bool Pipeline::step(Lock& lock) {
  if (broken_) return false;
  const RunPtr run = choose();
  if (!run) return false;
  auto& runs = run->frame >= 0 ? framed_ : frameless_;
  runs.erase(std::find(runs.begin(), runs.end(), run));
  if (!run->idle) {
    const auto& hypers = run->batch->hypers(run->index);
    char* const late = run->lent();
    lock.unlock();
    const auto start = Clock::now();
    update(*run->job, hypers, run->memory(frames_), pool_, late);
    run->times.update_from = start;
    run->times.update_to = Clock::now();
    lock.lock();
    const std::lock_guard<std::mutex> guard(run->batch->mutex_);
    run->batch->stats_.compute_seconds += std::chrono::duration<double>(run->times.update_to - start).count();
  }
  if (run->frame >= 0 && !run->idle && !run->job->writes.empty()) {
    run->stage = Stage::kHeld;
    held_.push_back(run);
    run->batch->set(run->index, Batch::State::kUpdated);
  } else {
    leave_frame(*run);
    note(*run);
    run->batch->set(run->index, Batch::State::kWritten);
  }
  return true;
}

void Pipeline::rest(Lock& lock) {
  const auto open = std::find_if(framed_.begin(), framed_.end(), [](const RunPtr& run) { return run->open(); });
  const RunPtr next = open == framed_.end() ? nullptr : *open;
  const bool reading = next && next->stage == Stage::kReading;
  const auto start = Clock::now();
  rest_ = reading ? Rest::kRead : writes_flying_ != 0 ? Rest::kWrite : Rest::kNone;
  rest_since_ = start;
  signal_->changed.wait(lock);
  std::tie(waited_read_seconds_, waited_write_seconds_) = waited_now();
  rest_ = Rest::kNone;
  if (!next) return;
  const double seconds = seconds_since(start);
  const std::lock_guard<std::mutex> guard(next->batch->mutex_);
  (reading ? next->batch->stats_.read_wait_seconds : next->batch->stats_.write_wait_seconds) += seconds;
}

std::pair<double, double> Pipeline::waited() const {
  const Lock lock(signal_->mutex);
  return waited_now();
}

std::pair<double, double> Pipeline::waited_now() const {
  const double under_way = rest_ == Rest::kNone ? 0 : seconds_since(rest_since_);
  return {waited_read_seconds_ + (rest_ == Rest::kRead ? under_way : 0),
          waited_write_seconds_ + (rest_ == Rest::kWrite ? under_way : 0)};
}

void Pipeline::trace(size_t most) {
  const Lock lock(signal_->mutex);
  traced_.open(most);
}

std::pair<std::vector<Traced>, uint64_t> Pipeline::traced() const {
  const Lock lock(signal_->mutex);
  return traced_.noted();
}

void Pipeline::note(Run& run) {
  run.times.job = run.job->number;
  if (!run.idle) traced_.add(run.times);
}

void Pipeline::start(Lock& lock, const RunPtr& run, const std::vector<Move>& moves, bool write) {
  // One more than there are, so that the last to finish is this call or a callback, never both.
  run->moves_left = moves.size() + 1;
  (write ? writes_flying_ : reads_flying_) += moves.size();
  lock.unlock();
  size_t started = 0;
  std::optional<io::IoError> refused;
  for (const Move& move : moves) {
    // The run is let go under the lock: it leads to the engine, which its own thread could not destroy.
    auto callback = [this, signal = signal_, run = run](const io::Transfer& transfer) mutable {
      const Lock guard(signal->mutex);
      moved(run, transfer);
      run.reset();
      signal->changed.notify_all();
    };
    char* const memory = run->memory(frames_) + move.frame_offset;
    try {
      if (write) {
        move.channel.write(move.file_offset, memory, move.nbytes, nullptr, std::move(callback));
      } else {
        move.channel.read(move.file_offset, memory, move.nbytes, nullptr, std::move(callback));
      }
    } catch (const std::exception& error) {
      refused.emplace(0, move.channel.file->path(), "swap file " + move.channel.file->path() + ": " + error.what());
      break;
    }
    ++started;
  }
  lock.lock();
  const size_t never = moves.size() - started;
  (write ? writes_flying_ : reads_flying_) -= never;
  run->moves_left -= never;
  if (refused) fail(run, *refused);
  if (--run->moves_left == 0) arrive(run);
}

void Pipeline::moved(const RunPtr& run, const io::Transfer& transfer) {
  --(transfer.is_write() ? writes_flying_ : reads_flying_);
  if (transfer.error()) {
    fail(run, *transfer.error());
  } else {
    const std::lock_guard<std::mutex> guard(run->batch->mutex_);
    BatchStats& stats = run->batch->stats_;
    (transfer.is_write() ? stats.bytes_written : stats.bytes_read) += transfer.nbytes();
  }
  if (--run->moves_left == 0) arrive(run);
}

// All moves of the run's stage are over.
void Pipeline::arrive(const RunPtr& run) {
  if (run->stage == Stage::kReading) {
    run->times.read_to = Clock::now();
    run->stage = run->complete ? Stage::kReady : Stage::kPrimed;  // should it have failed, abandon_all() finds it
    return;
  }
  writing_.erase(std::find(writing_.begin(), writing_.end(), run));
  leave_frame(*run);
  run->times.write_to = Clock::now();
  note(*run);
  run->batch->set(run->index, run->failed ? Batch::State::kFailed : Batch::State::kWritten);
}

void Pipeline::fail(const RunPtr& run, const io::IoError& error) {
  run->failed = true;
  run->batch->fail(run->index, error);
  if (!broken_) broken_ = error;
}

// Gives up all that is not updated, except jobs whose bytes are still arriving.
bool Pipeline::abandon_all() {
  unread_.clear();
  std::deque<RunPtr> arriving;
  bool worked = !frameless_.empty();
  for (const RunPtr& run : framed_) {
    if (run->stage == Stage::kReading) {
      arriving.push_back(run);
    } else {
      abandon(run);
      worked = true;
    }
  }
  framed_.swap(arriving);
  for (const RunPtr& run : frameless_) abandon(run);
  frameless_.clear();
  return worked;
}

void Pipeline::abandon(const RunPtr& run) {
  leave_frame(*run);
  run->batch->fail(run->index, *broken_);
  run->batch->set(run->index, Batch::State::kFailed);
}

void Pipeline::leave_frame(Run& run) {
  if (run.frame >= 0) free_frames_.push_back(run.frame);
  run.frame = -1;
}

void discard(Pipeline* pipeline) {
  if (pipeline != nullptr && !pipeline->foreign() && pipeline->finish()) delete pipeline;
}

}  // namespace offload
