// Threads for the kernels, independent of any OpenMP setting.
#pragma once

#include <algorithm>
#include <cstddef>
#include <type_traits>

namespace offload {

// A limit on how many threads one call uses. The threads themselves are the process's: made on first use, shared by
// every ThreadPool, replaced in a forked child. Calls from several threads at a time are fine: each caller works on
// its own call and the helpers take what is open.
class ThreadPool {
 public:
  // 0: default_threads() of topology.h.
  explicit ThreadPool(int threads = 0);

  int threads() const { return threads_; }

  // A grain for n elements: a multiple of `least` up to `most`, some four ranges a thread, so that unequal cores even
  // out, and no range so short that waking a thread for it costs more than it saves.
  std::size_t grain(std::size_t n, std::size_t least, std::size_t most) const {
    const std::size_t share = n / (4 * static_cast<std::size_t>(threads_)) / least * least;
    return std::min(std::max(share, least), most);
  }

  // Calls f(begin, count) for ranges that cover [0, n), each starting on a multiple of `grain`; returns when all are
  // done. Which thread takes which range is not fixed. f must not throw.
  template <class F>
  void for_ranges(std::size_t n, std::size_t grain, F&& f) {
    struct Work {
      std::size_t n, grain;
      std::remove_reference_t<F>* f;
    } work{n, grain, &f};
    run((n + grain - 1) / grain,
        [](void* context, std::size_t index) {
          const Work& w = *static_cast<Work*>(context);
          const std::size_t begin = index * w.grain;
          (*w.f)(begin, std::min(w.grain, w.n - begin));
        },
        &work);
  }

 private:
  void run(std::size_t count, void (*call)(void*, std::size_t), void* context);

  int threads_;
};

}  // namespace offload
