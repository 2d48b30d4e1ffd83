#include "pipeline/job.h"

#include <algorithm>
#include <stdexcept>
#include <string>

namespace offload {

namespace {

[[noreturn]] void refuse(const std::string& what) { throw std::invalid_argument("pipeline job: " + what); }

bool inside(uint64_t offset, uint64_t nbytes, uint64_t limit) { return offset <= limit && nbytes <= limit - offset; }

void check(const Move& move, uint64_t frame_bytes) {
  if (!inside(move.frame_offset, move.nbytes, frame_bytes)) refuse("a move reaches outside the frame");
  if (!inside(move.file_offset, move.nbytes, move.channel.file->size())) {
    refuse("a move reaches outside " + move.channel.file->path());
  }
}

// An array of a segment: `count` elements of `width` bytes, which the form needs or has no use for.
struct Need {
  const char* name;
  Place place;
  bool needed;
  uint64_t count;
  size_t width;
};

void check(const Need& need, uint64_t frame_bytes, bool framed) {
  const auto& [name, place, needed, count, width] = need;
  if (place.base == Base::kAbsent) {
    if (needed) refuse("only out may be absent, and what the form does not have: it has " + std::string(name));
    return;
  }
  if (place.base == Base::kAddress && place.offset == 0 && count != 0) refuse(std::string(name) + " has no address");
  if (place.offset % width != 0) refuse(std::string(name) + " is not aligned to its elements");
  if (place.base != Base::kFrame) return;
  if (!framed) refuse(std::string(name) + " is in a frame, but the job takes none");
  if (count > frame_bytes / width || !inside(place.offset, count * width, frame_bytes)) {
    refuse(std::string(name) + " reaches outside the frame");
  }
}

}  // namespace

void check(const Job& job, uint64_t frame_bytes) {
  for (const Move& move : job.reads) check(move, frame_bytes);
  for (const Move& move : job.writes) check(move, frame_bytes);
  const bool framed = job.needs_frame();
  const bool m = keeps_exp_avg(job.rule), v = keeps_exp_avg_sq(job.rule), coded = job.moments == Moments::i8;
  const size_t moment = bytes_of(job.moments);
  for (const Segment& s : job.segments) {
    if (s.first % kGroup != 0) refuse("a segment starts inside a group of " + std::to_string(kGroup) + " elements");
    for (const Need& need : {Need{"master", s.master, true, s.n, bytes_of(job.master)},
                             {"low", s.low, job.master == Master::split, s.n, 2},
                             {"exp_avg", s.exp_avg, m, s.n, moment},
                             {"exp_avg_scale", s.exp_avg_scale, m && coded, groups_of(s.n), sizeof(float)},
                             {"exp_avg_sq", s.exp_avg_sq, v, s.n, moment},
                             {"exp_avg_sq_scale", s.exp_avg_sq_scale, v && coded, groups_of(s.n), sizeof(float)},
                             {"grad", s.grad, true, s.n, bytes_of(job.grad_dtype)},
                             {"out", s.out, false, s.n, bytes_of(job.out_dtype)}}) {
      check(need, frame_bytes, framed);
    }
  }
}

const Move* Job::late_read() const {
  const auto is_late = [](const Move& move) { return move.late; };
  const auto first = std::find_if(reads.begin(), reads.end(), is_late);
  return first == reads.end() || std::any_of(first + 1, reads.end(), is_late) ? nullptr : &*first;
}

void update(const Job& job, const std::vector<Hyper>& hypers, char* frame, ThreadPool& pool, char* late) {
  const Move* const there = late == nullptr ? nullptr : job.late_read();
  const auto at = [&](const Place& place) -> void* {
    const bool lent = there != nullptr && place.base == Base::kFrame && place.offset >= there->frame_offset &&
                      place.offset - there->frame_offset < there->nbytes;
    return lent ? late + (place.offset - there->frame_offset) : place.resolve(frame);
  };
  for (const Segment& s : job.segments) {
    if (s.n == 0) continue;
    update(hypers[s.hyper], job.form(),
           {at(s.master), at(s.low), at(s.grad), at(s.exp_avg), at(s.exp_avg_scale), at(s.exp_avg_sq),
            at(s.exp_avg_sq_scale), at(s.out)},
           s.first, s.n, pool);
  }
}

}  // namespace offload
