// The newest of what was noted, up to a bound; what gave way is counted. Whoever owns it guards it.
#pragma once

#include <cstdint>
#include <utility>
#include <vector>

namespace offload {

template <class T>
class Ring {
 public:
  // Empty, with room for `capacity`; 0: nothing is noted.
  void open(size_t capacity) {
    items_ = std::vector<T>();
    items_.reserve(capacity);
    capacity_ = capacity;
    next_ = 0;
  }

  void add(const T& item) {
    if (capacity_ == 0) return;
    if (items_.size() < capacity_) {
      items_.push_back(item);
    } else {
      items_[next_ % capacity_] = item;
    }
    ++next_;
  }

  // Oldest first, and how many gave way.
  std::pair<std::vector<T>, uint64_t> noted() const {
    std::vector<T> out;
    out.reserve(items_.size());
    const uint64_t gone = next_ - items_.size();
    for (uint64_t i = gone; i < next_; ++i) out.push_back(items_[i % capacity_]);
    return {std::move(out), gone};
  }

 private:
  std::vector<T> items_;
  size_t capacity_ = 0;
  uint64_t next_ = 0;
};

}  // namespace offload
