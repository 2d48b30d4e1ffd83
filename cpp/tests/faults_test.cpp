// Seeded schedules of delays, overtaking, short transfers, interruptions, errors, torn writes and wrong bits: nothing
// hangs, an error is that of its own transfer, and what a read returns is what was written.
#include "io/faults.h"

#include <cerrno>
#include <cstring>
#include <random>
#include <vector>

#include "check.h"
#include "io/channel.h"
#include "pipeline/pipeline.h"
#include "scratch.h"

using namespace offload;

namespace {

unsigned schedules() { return emulated() ? 100 : 1000; }

io::Faults faults_of(unsigned seed) {
  std::mt19937 random(seed);
  const auto rate = [&random](double most) {
    return random() % 2 ? 0.0 : most * static_cast<double>(random() % 1000) / 1000;
  };
  io::Faults faults;
  faults.seed = seed;
  faults.short_rate = rate(0.5);
  faults.interrupt_rate = rate(0.4);
  faults.delay_rate = rate(0.1);
  faults.delay_us_max = 100;
  faults.reorder_rate = rate(0.5);
  faults.read_error_rate = rate(0.1);
  faults.write_error_rate = rate(0.1);
  faults.torn_rate = rate(0.1);
  faults.flip_rate = rate(0.1);
  return faults;
}

std::shared_ptr<io::FaultEngine> engine_of(unsigned seed) {
  const io::EngineOptions options{1 + seed % 5, seed % 3 ? 4096u : 16384u};
  return std::make_shared<io::FaultEngine>(options, faults_of(seed));
}

struct Extent {
  size_t begin, end;
  bool known = true;  // its last write succeeded, or so it was said
};

std::vector<Extent> extents_of(std::mt19937& random, size_t nbytes) {
  std::vector<Extent> extents;
  for (size_t at = random() % 3000; at < nbytes;) {
    const size_t size = random() % 2 ? 1 + random() % 20000 : 4096 * (1 + random() % 5);
    const size_t end = std::min(nbytes, at + size);
    extents.push_back({at, end});
    at = random() % 2 ? end : (end + 4095) / 4096 * 4096;
  }
  return extents;
}

bool succeeds(io::Transfer& transfer, const std::string& path) {
  std::string said[2];
  for (std::string& text : said) {  // its own error, at every wait
    try {
      transfer.wait();
    } catch (const io::IoError& error) {
      text = error.what();
    }
  }
  CHECK(transfer.done() && said[0] == said[1]);
  CHECK(said[0].empty() || said[0].find(transfer.describe() + " failed: ") != std::string::npos);
  CHECK(said[0].empty() || said[0].find(path) != std::string::npos);
  return said[0].empty();
}

void file_schedule(unsigned seed, unsigned* failed) {
  constexpr size_t kBytes = 60000;
  Scratch scratch;
  const std::string path = scratch.file("a");
  const io::Channel channel{engine_of(seed), std::make_shared<io::File>(path, kBytes, seed % 4 != 0, true)};
  std::mt19937 random(seed);
  std::vector<Extent> extents = extents_of(random, kBytes);
  std::vector<unsigned char> model(kBytes);
  for (int round = 0; round < 3; ++round) {
    std::vector<std::pair<std::shared_ptr<io::Transfer>, Extent*>> writes;
    for (Extent& extent : extents) {
      if (round != 0 && random() % 2) continue;
      for (size_t i = extent.begin; i < extent.end; ++i) model[i] = static_cast<unsigned char>(random());
      writes.emplace_back(channel.write(extent.begin, model.data() + extent.begin, extent.end - extent.begin), &extent);
    }
    for (auto& [write, extent] : writes) {
      extent->known = succeeds(*write, path);
      *failed += !extent->known;
    }
    // Every buffer its own allocation, so that a byte written too late or too far is seen.
    std::vector<std::pair<std::shared_ptr<io::Transfer>, size_t>> reads;
    std::vector<std::unique_ptr<unsigned char[]>> buffers;
    for (size_t k = 0; k < extents.size(); ++k) {
      const size_t begin = extents[k].begin + random() % (extents[k].end - extents[k].begin);
      const size_t nbytes = extents[k].end - begin;
      buffers.push_back(std::make_unique<unsigned char[]>(nbytes));
      reads.emplace_back(channel.read(begin, buffers.back().get(), nbytes), k);
    }
    for (auto& [read, k] : reads) {
      const bool good = succeeds(*read, path);
      *failed += !good;
      if (good && extents[k].known) CHECK(std::memcmp(buffers[k].get(), &model[read->offset()], read->nbytes()) == 0);
      buffers[k].reset();
    }
  }
}

constexpr uint64_t kElements = 700;
constexpr uint64_t kRecordBytes = 12288;

struct Chunk {
  std::vector<float> twin, grad;
  std::vector<uint16_t> out, twin_out;
  bool known = true;
};

Hyper hyper_of(int64_t step) {
  Hyper hyper = {};
  hyper.lr = 1e-2;
  hyper.beta1 = 0.9;
  hyper.beta2 = 0.99;
  hyper.eps = 1e-8;
  hyper.grad_scale = 1;
  hyper.step = step;
  hyper.active = hyper.decoupled = 1;
  return hyper;
}

Job job_of(const io::Channel& channel, size_t i, Chunk& chunk) {
  const auto address = [](const void* data) { return reinterpret_cast<uintptr_t>(data); };
  Job job;
  job.out_dtype = Dtype::bf16;
  job.segments = {{0,
                   kElements,
                   {Base::kFrame, 0},
                   {Base::kAddress, address(chunk.grad.data())},
                   {Base::kFrame, 4 * kElements},
                   {Base::kFrame, 8 * kElements},
                   {Base::kAddress, address(chunk.out.data())}}};
  job.reads = {{channel, i * kRecordBytes, 0, 12 * kElements}};
  job.writes = job.reads;
  return job;
}

void pipeline_schedule(unsigned seed, unsigned* failed) {
  constexpr size_t kChunks = 6;
  Scratch scratch;
  const std::string path = scratch.file("a");
  const auto file = std::make_shared<io::File>(path, kChunks * kRecordBytes, seed % 4 != 0, true);
  const io::Channel channel{engine_of(seed), file};
  const io::Channel plain{std::make_shared<io::ThreadEngine>(io::EngineOptions{2, 16384}), file};
  std::vector<io::Buffer> frames(1 + seed % 4);
  std::vector<char*> addresses;
  for (io::Buffer& frame : frames) {
    frame.reserve(kRecordBytes);
    addresses.push_back(frame.data());
  }
  std::mt19937 random(seed);
  std::vector<Chunk> chunks(kChunks);
  ThreadPool pool(1);
  {
    Pipeline pipeline(addresses, {kRecordBytes, 1, seed % 3});
    std::vector<size_t> jobs;
    for (size_t i = 0; i < kChunks; ++i) {
      Chunk& chunk = chunks[i];
      chunk.twin.resize(3 * kElements);
      chunk.grad.resize(kElements);
      for (float& x : chunk.twin) x = static_cast<float>(random() % 1000) / 1000;
      for (float& x : chunk.grad) x = static_cast<float>(random() % 1000) / 1000 - 0.5f;
      chunk.out.resize(kElements);
      chunk.twin_out.resize(kElements);
      plain.write(i * kRecordBytes, chunk.twin.data(), 12 * kElements)->wait();
      jobs.push_back(pipeline.add_job(job_of(channel, i, chunk)));
    }
    for (int step = 1; step <= 2; ++step) {
      const auto batch = pipeline.submit(jobs, {hyper_of(step)});
      for (size_t i = 0; i < kChunks; ++i) {
        Chunk& chunk = chunks[i];
        adam_update(hyper_of(step), chunk.twin.data(), chunk.grad.data(), Dtype::f32, chunk.twin.data() + kElements,
                    chunk.twin.data() + 2 * kElements, chunk.twin_out.data(), Dtype::bf16, kElements, pool);
        try {
          batch->wait_job(i, true);
          CHECK(chunk.out == chunk.twin_out);
        } catch (const io::IoError& error) {
          CHECK(std::strstr(error.what(), path.c_str()) != nullptr);
          chunk.known = false;
          ++*failed;
        }
      }
    }
  }
  for (size_t i = 0; i < kChunks; ++i) {
    std::vector<float> back(3 * kElements);
    try {
      plain.read(i * kRecordBytes, back.data(), 12 * kElements)->wait();
    } catch (const io::IoError& error) {  // a torn write
      CHECK(std::strstr(error.what(), "are not what was written there") != nullptr);
      continue;
    }
    if (chunks[i].known) CHECK(back == chunks[i].twin);
  }
}

}  // namespace

int main() {
  unsigned failed = 0;
  for (unsigned seed = 0; seed < schedules(); ++seed) file_schedule(seed, &failed);
  std::printf("%u schedules of files, %u transfers failed as they were told to\n", schedules(), failed);
  CHECK(failed > 100);
  failed = 0;
  for (unsigned seed = 0; seed < schedules(); ++seed) pipeline_schedule(seed, &failed);
  std::printf("%u schedules of the pipeline, %u jobs failed\n", schedules(), failed);
  CHECK(failed > 100);
  std::printf("ok\n");
  return 0;
}
