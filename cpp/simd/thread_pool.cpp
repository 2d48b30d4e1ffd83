#include "simd/thread_pool.h"

#include <pthread.h>
#include <signal.h>

#include <atomic>
#include <condition_variable>
#include <list>
#include <mutex>
#include <system_error>
#include <thread>

#include "simd/topology.h"

namespace offload {
namespace {

struct Job {
  void (*call)(void*, std::size_t);
  void* context;
  std::size_t count;
  std::atomic<std::size_t> next{0};
  int seats;        // helpers that may still join; under the crew's mutex, as is `working`
  int working = 0;  // helpers inside

  void drain() {
    for (std::size_t i; (i = next.fetch_add(1, std::memory_order_relaxed)) < count;) call(context, i);
  }
};

// The process's helper threads. Never destroyed: helpers are detached and may outlive main().
class Crew {
 public:
  void run(Job& job) {
    const int helpers = job.seats;
    std::list<Job*>::iterator place;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      grow(helpers);
      place = open_.insert(open_.end(), &job);
    }
    helpers == 1 ? wake_.notify_one() : wake_.notify_all();
    job.drain();
    std::unique_lock<std::mutex> lock(mutex_);
    open_.erase(place);
    done_.wait(lock, [&] { return job.working == 0; });
  }

 private:
  void grow(int helpers) {
    if (members_ >= helpers) return;
    sigset_t all, before;  // signals are for the application's threads
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    try {
      for (; members_ < helpers; ++members_) std::thread([this] { serve(); }).detach();
    } catch (const std::system_error&) {
      // No more threads to be had: the callers do the work.
    }
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
  }

  Job* open_job() {
    for (Job* job : open_)
      if (job->seats > 0 && job->next.load(std::memory_order_relaxed) < job->count) return job;
    return nullptr;
  }

  void serve() {
    std::unique_lock<std::mutex> lock(mutex_);
    for (;;) {
      Job* job;
      wake_.wait(lock, [&] { return (job = open_job()) != nullptr; });
      --job->seats;
      ++job->working;
      lock.unlock();
      job->drain();
      lock.lock();
      if (--job->working == 0) done_.notify_all();
    }
  }

  std::mutex mutex_;
  std::condition_variable wake_, done_;
  std::list<Job*> open_;
  int members_ = 0;
};

std::atomic<Crew*> current_crew{nullptr};

Crew& crew() {
  static const int registered = pthread_atfork(nullptr, nullptr, [] { current_crew.store(nullptr); });
  (void)registered;
  Crew* found = current_crew.load(std::memory_order_acquire);
  if (!found) {
    Crew* made = new Crew;
    if (current_crew.compare_exchange_strong(found, made, std::memory_order_acq_rel))
      found = made;
    else
      delete made;
  }
  return *found;
}

}  // namespace

ThreadPool::ThreadPool(int threads) : threads_(threads > 0 ? threads : default_threads()) {}

void ThreadPool::run(std::size_t count, void (*call)(void*, std::size_t), void* context) {
  const std::size_t helpers = std::min<std::size_t>(threads_, count) - (count > 0);
  if (helpers == 0) {
    for (std::size_t i = 0; i < count; ++i) call(context, i);
    return;
  }
  Job job;
  job.call = call;
  job.context = context;
  job.count = count;
  job.seats = static_cast<int>(helpers);
  crew().run(job);
}

}  // namespace offload
