#include "pipeline/job.h"

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

void check(const Place& place, const char* name, uint64_t n, size_t width, uint64_t frame_bytes, bool framed) {
  if (place.base == Base::kAbsent) return;
  if (place.base == Base::kAddress && place.offset == 0 && n != 0) refuse(std::string(name) + " has no address");
  if (place.offset % width != 0) refuse(std::string(name) + " is not aligned to its elements");
  if (place.base != Base::kFrame) return;
  if (!framed) refuse(std::string(name) + " is in a frame, but the job takes none");
  if (n > frame_bytes / width || !inside(place.offset, n * width, frame_bytes)) {
    refuse(std::string(name) + " reaches outside the frame");
  }
}

}  // namespace

void check(const Job& job, uint64_t frame_bytes) {
  for (const Move& move : job.reads) check(move, frame_bytes);
  for (const Move& move : job.writes) check(move, frame_bytes);
  const bool framed = job.needs_frame();
  for (const Segment& s : job.segments) {
    for (const Place& place : {s.master, s.grad, s.exp_avg, s.exp_avg_sq}) {
      if (place.base == Base::kAbsent) refuse("only out may be absent");
    }
    check(s.master, "master", s.n, sizeof(float), frame_bytes, framed);
    check(s.exp_avg, "exp_avg", s.n, sizeof(float), frame_bytes, framed);
    check(s.exp_avg_sq, "exp_avg_sq", s.n, sizeof(float), frame_bytes, framed);
    check(s.grad, "grad", s.n, bytes_of(job.grad_dtype), frame_bytes, framed);
    check(s.out, "out", s.n, bytes_of(job.out_dtype), frame_bytes, framed);
  }
}

void update(const Job& job, const std::vector<Hyper>& hypers, char* frame, ThreadPool& pool) {
  for (const Segment& s : job.segments) {
    if (s.n == 0) continue;
    adam_update(hypers[s.hyper], static_cast<float*>(s.master.resolve(frame)), s.grad.resolve(frame), job.grad_dtype,
                static_cast<float*>(s.exp_avg.resolve(frame)), static_cast<float*>(s.exp_avg_sq.resolve(frame)),
                s.out.resolve(frame), job.out_dtype, s.n, pool);
  }
}

}  // namespace offload
