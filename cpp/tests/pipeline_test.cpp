// The pipeline against the same updates done one by one in memory: equal bits, whatever is in flight at the time.
#include "pipeline/pipeline.h"

#include <algorithm>
#include <cerrno>
#include <cmath>
#include <cstring>
#include <random>
#include <thread>
#include <vector>

#include "check.h"
#include "io/faults.h"
#include "io/threads.h"
#include "io/uring.h"
#include "scratch.h"

using namespace offload;

namespace {

constexpr uint64_t kElements = 1500;
constexpr uint64_t kRecordBytes = 20480;  // master, exp_avg, exp_avg_sq; gradient and copy in the frame fit too

Hyper hyper_of(int64_t step) {
  Hyper hyper = {};
  hyper.lr = 1e-2;
  hyper.beta1 = 0.9;
  hyper.beta2 = 0.99;
  hyper.eps = 1e-8;
  hyper.weight_decay = 0.1;
  hyper.grad_scale = 0.5;
  hyper.step = step;
  hyper.active = hyper.decoupled = 1;
  return hyper;
}

// One chunk: its state in a file or in memory, and a twin updated the plain way.
struct Chunk {
  std::vector<float> state, twin, grad;
  std::vector<uint16_t> out, twin_out;
  bool framed = false;
  size_t job = 0;

  void update_twin(const Hyper& hyper, ThreadPool& pool) {
    adam_update(hyper, twin.data(), grad.data(), Dtype::f32, twin.data() + kElements, twin.data() + 2 * kElements,
                twin_out.data(), Dtype::bf16, kElements, pool);
  }
};

struct Rig {
  Scratch scratch;
  io::Channel channel;
  std::vector<io::Buffer> frames;
  std::shared_ptr<Pipeline> pipeline;
  std::vector<Chunk> chunks;
  ThreadPool pool{1};

  Rig(std::shared_ptr<io::Engine> engine, size_t frame_count, unsigned group, size_t count, bool mixed,
      bool lazy = false) {
    channel = {std::move(engine), std::make_shared<io::File>(scratch.file("a"), count * kRecordBytes, true)};
    frames.resize(frame_count);
    std::vector<char*> addresses;
    for (io::Buffer& frame : frames) {
      frame.reserve(kRecordBytes);
      addresses.push_back(frame.data());
    }
    pipeline = std::shared_ptr<Pipeline>(new Pipeline(addresses, {kRecordBytes, 2, group, lazy}),
                                         [](Pipeline* p) { discard(p); });
    chunks.resize(count);
    for (size_t i = 0; i < count; ++i) add(i, !mixed || i % 3 != 1);
  }

  void add(size_t i, bool framed) {
    Chunk& chunk = chunks[i];
    std::mt19937 random(static_cast<unsigned>(i));
    std::normal_distribution<float> normal;
    chunk.state.resize(3 * kElements);
    for (float& x : chunk.state) x = std::abs(normal(random));
    chunk.grad.resize(kElements);
    for (float& x : chunk.grad) x = normal(random);
    chunk.twin = chunk.state;
    chunk.out.resize(kElements);
    chunk.twin_out.resize(kElements);
    chunk.framed = framed;
    Job job;
    job.out_dtype = Dtype::bf16;
    const auto address = [](const void* data) { return reinterpret_cast<uintptr_t>(data); };
    const Base base = framed ? Base::kFrame : Base::kAddress;
    const uint64_t origin = framed ? 0 : address(chunk.state.data());
    Segment segment{0,
                    kElements,
                    {base, origin},
                    {Base::kAddress, address(chunk.grad.data())},
                    {base, origin + 4 * kElements},
                    {base, origin + 8 * kElements},
                    {Base::kAddress, address(chunk.out.data())}};
    job.segments.push_back(segment);
    if (framed) {
      // In two moves, of which the second is unaligned.
      job.reads = {{channel, i * kRecordBytes, 0, 4096},
                   {channel, i * kRecordBytes + 4096, 4096, 12 * kElements - 4096}};
      job.writes = job.reads;
    }
    chunk.job = pipeline->add_job(std::move(job));
  }

  void fill() {
    for (size_t i = 0; i < chunks.size(); ++i) {
      if (chunks[i].framed) channel.write(i * kRecordBytes, chunks[i].state.data(), 12 * kElements)->wait();
    }
  }

  std::vector<size_t> all() const {
    std::vector<size_t> jobs;
    for (const Chunk& chunk : chunks) jobs.push_back(chunk.job);
    return jobs;
  }

  void compare() {
    for (size_t i = 0; i < chunks.size(); ++i) {
      Chunk& chunk = chunks[i];
      if (chunk.framed) channel.read(i * kRecordBytes, chunk.state.data(), 12 * kElements)->wait();
      CHECK(std::memcmp(chunk.state.data(), chunk.twin.data(), 12 * kElements) == 0);
      CHECK(chunk.out == chunk.twin_out);
    }
  }
};

std::shared_ptr<io::Engine> make_engine(int kind) {
  const io::EngineOptions options{4, 4096};
  io::Engine* engine = nullptr;
  if (kind == 0) {
    try {
      engine = io::make_uring_engine(options).release();
    } catch (const io::Unavailable&) {
    }
  }
  if (kind == 2) {
    io::Faults faults;
    faults.seed = 5;
    faults.short_rate = 0.3;
    faults.interrupt_rate = 0.2;
    faults.delay_rate = 0.3;
    faults.delay_us_max = 200;
    engine = new io::FaultEngine(options, faults);
  }
  return std::shared_ptr<io::Engine>(engine ? engine : new io::ThreadEngine(options),
                                     [](io::Engine* e) { io::discard(e); });
}

// Several batches submitted before any is waited for: a chunk is read again while its last write is under way.
void equal_bits(int kind, size_t frame_count, unsigned group, size_t count, bool mixed, bool lazy = false) {
  Rig rig(make_engine(kind), frame_count, group, count, mixed, lazy);
  rig.fill();
  std::vector<std::shared_ptr<Batch>> batches;
  for (int step = 1; step <= 3; ++step) {
    std::vector<size_t> jobs = rig.all();
    if (step == 3) jobs.insert(jobs.end(), jobs.begin(), jobs.end());  // each twice in one batch
    batches.push_back(rig.pipeline->submit(jobs, {hyper_of(step)}));
    for (Chunk& chunk : rig.chunks) {
      for (int again = 0; again < (step == 3 ? 2 : 1); ++again) chunk.update_twin(hyper_of(step), rig.pool);
    }
  }
  for (size_t i = 0; i < rig.chunks.size(); ++i) batches[0]->wait_job(i, i % 2 == 0);
  for (const auto& batch : batches) batch->wait();
  CHECK(batches[2]->done());
  size_t framed = 0;
  for (const Chunk& chunk : rig.chunks) framed += chunk.framed;
  CHECK(batches[0]->stats().bytes_read == framed * 12 * kElements);
  CHECK(batches[0]->stats().bytes_written == framed * 12 * kElements);
  rig.compare();
}

// A split master and moments in bytes, all in the frame, in two segments of which the second starts inside a parameter.
void other_forms() {
  constexpr uint64_t n = 1300, cut = 1024, groups = 6;
  Rig rig(make_engine(2), 2, 0, 0, false);
  rig.channel.file = std::make_shared<io::File>(rig.scratch.file("b"), kRecordBytes, true);
  std::mt19937 random(3);
  std::normal_distribution<float> normal;
  std::vector<float> p(n), g(n);
  for (uint64_t i = 0; i < n; ++i) p[i] = normal(random), g[i] = normal(random);
  // Offsets in the record: parameter, low, exp_avg, exp_avg_sq, their scales, the gradient; exp_avg begins odd.
  const std::vector<uint64_t> at = {0, 2 * n, 4 * n + 1, 5 * n + 1, 6 * n + 4, 6 * n + 4 + 4 * groups, 12288};
  std::vector<char> record(kRecordBytes), twin;
  split(&record[at[0]], &record[at[1]], p.data(), n, rig.pool);
  std::memcpy(&record[at[6]], g.data(), 4 * n);
  twin = record;
  const Form form{Master::split, Moments::i8, Dtype::f32, Dtype::f32};
  Job job;
  job.master = form.master;
  job.moments = form.moments;
  for (const uint64_t first : {uint64_t{0}, cut}) {
    const auto framed = [&](size_t k, uint64_t width) { return Place{Base::kFrame, at[k] + first * width}; };
    const auto scale = [&](size_t k) { return Place{Base::kFrame, at[k] + first / kGroup * sizeof(float)}; };
    job.segments.push_back({0, first ? n - cut : cut, framed(0, 2), framed(6, 4), framed(2, 1), framed(3, 1), kNowhere,
                            framed(1, 2), scale(4), scale(5), first});
  }
  job.reads = job.writes = {{rig.channel, 0, 0, kRecordBytes}};
  const size_t number = rig.pipeline->add_job(job);
  rig.channel.write(0, record.data(), kRecordBytes)->wait();
  for (int step = 1; step <= 3; ++step) {
    Hyper hyper = hyper_of(step);
    hyper.seed = 9;
    rig.pipeline->submit({number}, {hyper})->wait();
    update(hyper, form,
           {&twin[at[0]], &twin[at[1]], &twin[at[6]], &twin[at[2]], &twin[at[4]], &twin[at[3]], &twin[at[5]], nullptr},
           0, n, rig.pool);
  }
  rig.channel.read(0, record.data(), kRecordBytes)->wait();
  CHECK(record == twin);
  Hyper lion = hyper_of(4);
  lion.rule = static_cast<uint8_t>(Rule::lion);
  CHECK_THROWS(std::invalid_argument, rig.pipeline->submit({number}, {lion}), "of rule 1");
  Job wrong = job;
  wrong.segments[1].first = 1000;
  CHECK_THROWS(std::invalid_argument, rig.pipeline->add_job(wrong), "inside a group");
  wrong = job;
  wrong.segments[0].exp_avg_scale = kNowhere;
  CHECK_THROWS(std::invalid_argument, rig.pipeline->add_job(wrong), "it has exp_avg_scale");
  wrong.rule = Rule::adagrad;  // has no exp_avg
  wrong.segments[0].exp_avg = kNowhere;
  rig.pipeline->add_job(wrong);
  wrong.segments[0].low = kNowhere;
  CHECK_THROWS(std::invalid_argument, rig.pipeline->add_job(wrong), "it has low");
}

void idle_jobs() {
  Rig rig(make_engine(1), 2, 0, 4, true);
  rig.fill();
  Hyper off = hyper_of(1);
  off.active = 0;
  auto batch = rig.pipeline->submit(rig.all(), {off});
  batch->wait();
  CHECK(batch->stats().bytes_read == 0 && batch->stats().bytes_written == 0);
  CHECK(rig.chunks[0].out == std::vector<uint16_t>(kElements));
  batch = rig.pipeline->submit(rig.all(), {off}, true);
  batch->wait();
  CHECK(batch->stats().bytes_read == 3 * 12 * kElements);
  for (Chunk& chunk : rig.chunks) chunk.update_twin(off, rig.pool);
  rig.compare();
  batch = rig.pipeline->submit({}, {});
  batch->wait();
  CHECK(batch->done());
}

void failures(bool reading, size_t frame_count) {
  io::Faults faults;
  (reading ? faults.read_errno : faults.write_errno) = reading ? EIO : ENOSPC;
  faults.bad_begin = 3 * kRecordBytes;
  faults.bad_end = faults.bad_begin + 1;
  const auto engine = std::make_shared<io::FaultEngine>(io::EngineOptions{1, 4096}, faults);
  Rig rig(engine, frame_count, 1, 12, false);
  engine->hold();
  auto first = rig.pipeline->submit(rig.all(), {hyper_of(1)});
  auto second = rig.pipeline->submit(rig.all(), {hyper_of(2)});
  engine->release();
  CHECK_THROWS(io::IoError, first->wait(), reading ? "EIO" : "ENOSPC");
  CHECK_THROWS(io::IoError, first->wait_job(3, true), "at offset 61440 of ");
  CHECK_THROWS(io::IoError, first->wait_job(11, false), "at offset 61440 of ");
  CHECK_THROWS(std::out_of_range, first->reached(12, false), "no such job");
  CHECK_THROWS(io::IoError, second->wait(), reading ? "EIO" : "ENOSPC");
  auto third = rig.pipeline->submit({0}, {hyper_of(3)});
  CHECK_THROWS(io::IoError, third->wait(), reading ? "EIO" : "ENOSPC");
  CHECK(first->failed() && first->reached(3, true) && first->reached(11, false));
  if (!reading) first->wait_job(0, true);  // done before the failure
  rig.pipeline.reset();
}

// Jobs in memory run when somebody waits for something, and at the end.
void lazy_jobs() {
  Rig rig(make_engine(1), 2, 0, 9, true, true);
  rig.fill();
  const auto batch = rig.pipeline->submit(rig.all(), {hyper_of(1)});
  for (size_t i = 0; i < rig.chunks.size(); ++i) {
    while (rig.chunks[i].framed && !batch->reached(i, true)) std::this_thread::yield();
  }
  for (size_t i = 0; i < rig.chunks.size(); ++i) CHECK(batch->reached(i, false) == rig.chunks[i].framed);
  batch->wait_job(4, false);
  for (Chunk& chunk : rig.chunks) chunk.update_twin(hyper_of(1), rig.pool);
  batch->wait();
  rig.compare();
  const auto last = rig.pipeline->submit(rig.all(), {hyper_of(2)});
  rig.pipeline.reset();
  CHECK(last->done());
  for (Chunk& chunk : rig.chunks) chunk.update_twin(hyper_of(2), rig.pool);
  rig.compare();
}

// What is prepared reads ahead and waits; what is cancelled changes nothing; writes to what was read ahead are not
// lost.
void prepared(int kind, size_t frame_count, bool mixed) {
  Rig rig(make_engine(kind), frame_count, 0, 11, mixed);
  rig.fill();
  for (int step = 1; step <= 4; ++step) {
    if (step > 1) {  // the last step's writes are still under way
      const auto dropped = rig.pipeline->prepare(rig.all());
      CHECK_THROWS(std::invalid_argument, rig.pipeline->submit({0}, {hyper_of(1)}), "begin or cancel it first");
      CHECK_THROWS(std::invalid_argument, rig.pipeline->prepare({0}), "begin or cancel it first");
      rig.pipeline->cancel(dropped);
      CHECK_THROWS(std::invalid_argument, rig.pipeline->cancel(dropped), "not the prepared one");
      dropped->wait();
      Chunk& chunk = rig.chunks[0];
      for (float& x : chunk.twin) x += 1;
      if (chunk.framed) rig.channel.write(0, chunk.twin.data(), 12 * kElements)->wait();
    }
    const auto batch = rig.pipeline->prepare(rig.all());
    CHECK_THROWS(std::invalid_argument, rig.pipeline->begin(batch, {}), "hyper-parameters 0 of 0");
    for (Chunk& chunk : rig.chunks) {  // gradients come last
      for (float& x : chunk.grad) x += 0.5f;
    }
    Hyper hyper = hyper_of(step);
    hyper.active = step != 3;
    rig.pipeline->begin(batch, {hyper});
    if (step == 3) continue;
    for (Chunk& chunk : rig.chunks) chunk.update_twin(hyper, rig.pool);
    for (size_t i = 0; i < rig.chunks.size(); ++i) batch->wait_job(i, i == 0);
    if (step == 4) batch->wait();
  }
  const auto last = rig.pipeline->prepare(rig.all());
  rig.compare();
  rig.pipeline.reset();  // ends what nobody began
  CHECK(last->done());
}

// The gradient rests in the file too and is written there after the rest was read ahead.
void late_reads() {
  Rig rig(make_engine(2), 2, 0, 0, false);
  constexpr size_t n = 1024, count = 5;
  rig.channel.file = std::make_shared<io::File>(rig.scratch.file("b"), count * kRecordBytes, true);
  std::vector<std::vector<float>> records(count, std::vector<float>(4 * n)), twins;
  std::vector<size_t> jobs;
  for (size_t i = 0; i < count; ++i) {
    for (size_t k = 0; k < 3 * n; ++k) records[i][k] = static_cast<float>(k % 97 + i);
    const auto framed = [](size_t k) { return Place{Base::kFrame, 4 * k * n}; };
    Job job;
    job.segments = {{0, n, framed(0), framed(3), framed(1), framed(2), kNowhere}};
    job.reads = job.writes = {{rig.channel, i * kRecordBytes, 0, 12 * n}};
    job.reads.push_back({rig.channel, i * kRecordBytes + 12 * n, 12 * n, 4 * n, true});
    jobs.push_back(rig.pipeline->add_job(job));
    rig.channel.write(i * kRecordBytes, records[i].data(), 16 * n)->wait();
  }
  twins = records;
  for (int step = 1; step <= 3; ++step) {
    const auto batch = rig.pipeline->prepare(jobs);
    for (size_t i = 0; i < count; ++i) {
      std::fill_n(twins[i].begin() + 3 * n, n, static_cast<float>(step) - 0.25f * i);
      rig.channel.write(i * kRecordBytes + 12 * n, &twins[i][3 * n], 4 * n)->wait();
    }
    rig.pipeline->begin(batch, {hyper_of(step)});
    for (size_t i = 0; i < count; ++i) {
      batch->wait_job(i, false);  // the gradient was read: the next may be written over it
      float* t = twins[i].data();
      adam_update(hyper_of(step), t, t + 3 * n, Dtype::f32, t + n, t + 2 * n, nullptr, Dtype::f32, n, rig.pool);
    }
    batch->wait();
    CHECK(batch->stats().bytes_read == count * 16 * n);
  }
  for (size_t i = 0; i < count; ++i) {
    rig.channel.read(i * kRecordBytes, records[i].data(), 16 * n)->wait();
    CHECK(records[i] == twins[i]);
  }
}

// Gradients that are lent are taken from where they are, whether their job has a frame yet or not: neither is the file
// read, where something else lies, nor the memory used any more once the job is updated.
void lent_reads(int kind, size_t frame_count) {
  Rig rig(make_engine(kind), frame_count, 0, 0, false);
  constexpr size_t n = 1024, count = 7;
  rig.channel.file = std::make_shared<io::File>(rig.scratch.file("b"), count * kRecordBytes, true);
  std::vector<std::vector<float>> records(count, std::vector<float>(4 * n)), twins, grads(count);
  std::vector<size_t> jobs;
  for (size_t i = 0; i < count; ++i) {
    for (size_t k = 0; k < 3 * n; ++k) records[i][k] = static_cast<float>(k % 89 + i);
    const auto framed = [](size_t k) { return Place{Base::kFrame, 4 * k}; };
    Job job;  // two parameters, the second from the middle on
    for (const size_t at : {size_t{0}, n / 2}) {
      job.segments.push_back({0, n / 2, framed(at), framed(3 * n + at), framed(n + at), framed(2 * n + at), kNowhere});
    }
    job.reads = job.writes = {{rig.channel, i * kRecordBytes, 0, 12 * n}};
    job.reads.push_back({rig.channel, i * kRecordBytes + 12 * n, 12 * n, 4 * n, true});
    jobs.push_back(rig.pipeline->add_job(job));
    rig.channel.write(i * kRecordBytes, records[i].data(), 16 * n)->wait();
  }
  twins = records;
  for (int step = 1; step <= 4; ++step) {
    const auto batch = rig.pipeline->prepare(jobs);
    rig.pipeline->gate(batch, {hyper_of(step)});
    std::vector<size_t> order(count);
    for (size_t i = 0; i < count; ++i) order[i] = i;
    std::shuffle(order.begin(), order.end(), std::mt19937(static_cast<unsigned>(step)));
    size_t lent = 0;
    for (const size_t i : order) {
      grads[i].assign(n, static_cast<float>(step) - 0.25f * static_cast<float>(i));
      float* t = twins[i].data();
      adam_update(hyper_of(step), t, grads[i].data(), Dtype::f32, t + n, t + 2 * n, nullptr, Dtype::f32, n, rig.pool);
      if ((i + static_cast<size_t>(step)) % 3 == 0) {
        rig.channel.write(i * kRecordBytes + 12 * n, grads[i].data(), 4 * n)->wait();
        if (i % 2 == 0) rig.pipeline->open(batch, i);  // the others are settled
      } else {
        std::vector<float> other(n, std::nanf(""));
        rig.channel.write(i * kRecordBytes + 12 * n, other.data(), 4 * n)->wait();
        rig.pipeline->open(batch, i, reinterpret_cast<char*>(grads[i].data()));
        ++lent;
      }
    }
    const size_t open = step % 3 == 0 ? 1 : 0;  // one that was lent to
    CHECK_THROWS(std::invalid_argument, rig.pipeline->open(batch, open), "open already");
    for (const size_t i : order) {
      if ((i + static_cast<size_t>(step)) % 3 == 0) continue;
      batch->wait_job(i, false);
      std::fill(grads[i].begin(), grads[i].end(), std::nanf(""));
      CHECK(!rig.pipeline->has_frame(batch, i));
    }
    rig.pipeline->settle(batch, {hyper_of(step)});
    batch->wait();
    CHECK(batch->stats().bytes_read == count * 12 * n + (count - lent) * 4 * n || frame_count < count);
  }
  for (size_t i = 0; i < count; ++i) {
    rig.channel.read(i * kRecordBytes, records[i].data(), 16 * n)->wait();
    CHECK(std::equal(records[i].begin(), records[i].begin() + 3 * n, twins[i].begin()));
  }
}

// Jobs opened in any order, some never; the rest have hyper-parameters of their own. A job that is open ends though
// others keep their frames shut.
void gated(int kind, size_t frame_count, bool mixed, unsigned order) {
  Rig rig(make_engine(kind), frame_count, 0, 11, mixed);
  rig.fill();
  for (int step = 1; step <= 4; ++step) {
    const auto batch = rig.pipeline->prepare(rig.all());
    CHECK_THROWS(std::invalid_argument, rig.pipeline->open(batch, 0), "not the gated one");
    CHECK_THROWS(std::invalid_argument, rig.pipeline->gate(batch, {}), "hyper-parameters 0 of 0");
    rig.pipeline->gate(batch, {hyper_of(step)});
    CHECK_THROWS(std::invalid_argument, rig.pipeline->prepare({0}), "settle or cancel it first");
    CHECK_THROWS(std::invalid_argument, rig.pipeline->submit({0}, {hyper_of(1)}), "settle or cancel it first");
    CHECK_THROWS(std::invalid_argument, rig.pipeline->begin(batch, {hyper_of(1)}), "not the prepared one");
    std::vector<size_t> opened(rig.chunks.size());
    for (size_t i = 0; i < opened.size(); ++i) opened[i] = order == 0 ? i : opened.size() - 1 - i;
    if (order > 1) std::shuffle(opened.begin(), opened.end(), std::mt19937(order + step));
    opened.resize(step == 4 ? opened.size() : opened.size() - order % 4 - 1);
    std::vector<bool> early(rig.chunks.size());
    for (const size_t i : opened) {
      Chunk& chunk = rig.chunks[i];
      for (float& x : chunk.grad) x += 0.5f;  // it comes last
      rig.pipeline->open(batch, i);
      if (order % 2 == 1) batch->wait_job(i, i % 2 == 0);
      early[i] = true;
      chunk.update_twin(hyper_of(step), rig.pool);
    }
    for (const size_t i : opened) batch->wait_job(i, true);
    for (size_t i = 0; i < early.size(); ++i) CHECK(early[i] || !batch->reached(i, false));
    CHECK(step == 4 || !batch->done());
    Hyper late = hyper_of(step + 7);
    late.active = step != 2;
    if (step == 3) {
      rig.pipeline->cancel(batch);
    } else {
      rig.pipeline->settle(batch, {late});
    }
    CHECK_THROWS(std::invalid_argument, rig.pipeline->open(batch, 0), "not the gated one");
    for (size_t i = 0; i < early.size(); ++i) {
      if (!early[i] && step == 1) rig.chunks[i].update_twin(late, rig.pool);
    }
    batch->wait();
  }
  const auto last = rig.pipeline->prepare(rig.all());
  rig.pipeline->gate(last, {hyper_of(5)});
  rig.pipeline->open(last, 3);
  rig.chunks[3].update_twin(hyper_of(5), rig.pool);
  last->wait_job(3, true);
  rig.compare();
  rig.pipeline.reset();  // ends what nobody settled
  CHECK(last->done());
}

// An error ends a gated batch whether its jobs are open or not.
void gated_failures(size_t frame_count, bool writing) {
  io::Faults faults;
  (writing ? faults.write_errno : faults.read_errno) = EIO;
  faults.bad_begin = 3 * kRecordBytes;
  faults.bad_end = faults.bad_begin + 1;
  Rig rig(std::make_shared<io::FaultEngine>(io::EngineOptions{1, 4096}, faults), frame_count, 1, 6, false);
  const auto batch = rig.pipeline->prepare(rig.all());
  rig.pipeline->gate(batch, {hyper_of(1)});
  rig.pipeline->open(batch, 3);
  CHECK_THROWS(io::IoError, batch->wait_job(3, true), "EIO");
  CHECK_THROWS(io::IoError, batch->wait(), "EIO");
  rig.pipeline->open(batch, 1);
  rig.pipeline->settle(batch, {hyper_of(1)});
  CHECK_THROWS(io::IoError, batch->wait_job(1, false), "EIO");
  CHECK_THROWS(io::IoError, rig.pipeline->submit(rig.all(), {hyper_of(2)})->wait(), "EIO");
}

void prepared_failures(size_t frame_count) {
  io::Faults faults;
  faults.read_errno = EIO;
  faults.bad_begin = 3 * kRecordBytes;
  faults.bad_end = faults.bad_begin + 1;
  for (const bool cancelled : {false, true}) {
    Rig rig(std::make_shared<io::FaultEngine>(io::EngineOptions{1, 4096}, faults), frame_count, 1, 6, false);
    const auto batch = rig.pipeline->prepare(rig.all());
    if (frame_count > 3) CHECK_THROWS(io::IoError, batch->wait_job(3, false), "EIO");
    if (cancelled) {
      rig.pipeline->cancel(batch);
      if (frame_count > 3) CHECK_THROWS(io::IoError, batch->wait(), "EIO");
    } else {
      rig.pipeline->begin(batch, {hyper_of(1)});
      CHECK_THROWS(io::IoError, batch->wait(), "EIO");
    }
  }
}

void dropped_in_flight() {
  const auto engine = std::make_shared<io::FaultEngine>(io::EngineOptions{2, 4096}, io::Faults{});
  Rig rig(engine, 3, 0, 9, true);
  rig.fill();
  engine->hold();
  rig.pipeline->submit(rig.all(), {hyper_of(1)});  // the batch is nobody's
  engine->release();
  rig.pipeline.reset();  // finishes it
  for (Chunk& chunk : rig.chunks) chunk.update_twin(hyper_of(1), rig.pool);
  rig.compare();
}

void refusals() {
  Rig rig(make_engine(1), 1, 0, 1, false);
  CHECK_THROWS(std::invalid_argument, rig.pipeline->submit({7}, {hyper_of(1)}), "no job 7");
  CHECK_THROWS(std::invalid_argument, rig.pipeline->submit({0}, {}), "hyper-parameters 0 of 0");
  Job job;
  job.reads = {{rig.channel, 0, 8192, kRecordBytes}};
  CHECK_THROWS(std::invalid_argument, rig.pipeline->add_job(job), "outside the frame");
  job.reads = {{rig.channel, 8192, 0, kRecordBytes}};
  CHECK_THROWS(std::invalid_argument, rig.pipeline->add_job(job), "outside ");
  job.reads = {{rig.channel, 0, 0, 4096}};
  const Place framed{Base::kFrame, 0};
  job.segments = {{0, UINT64_MAX / 2, framed, framed, framed, framed, {Base::kAbsent, 0}}};
  CHECK_THROWS(std::invalid_argument, rig.pipeline->add_job(job), "outside the frame");
  job.segments = {{0, 1, framed, {Base::kAbsent, 0}, framed, framed, {Base::kAbsent, 0}}};
  CHECK_THROWS(std::invalid_argument, rig.pipeline->add_job(job), "only out");
  job.reads.clear();
  job.segments = {{0, 1, framed, framed, framed, framed, {Base::kAbsent, 0}}};
  CHECK_THROWS(std::invalid_argument, rig.pipeline->add_job(job), "takes none");
}

}  // namespace

int main() {
  for (int kind = 0; kind < 3; ++kind) {
    for (size_t frames = 1; frames <= 5; ++frames) {
      for (const unsigned group : {0u, 1u, 3u}) equal_bits(kind, frames, group, 11, true);
      equal_bits(kind, frames, 0, 1, false);
      equal_bits(kind, frames, 0, 11, true, true);
    }
    equal_bits(kind, 0, 0, 0, false);
  }
  idle_jobs();
  other_forms();
  for (const size_t frames : {1, 2, 5}) {
    failures(true, frames);
    failures(false, frames);
  }
  for (int kind = 0; kind < 3; ++kind) {
    for (const size_t frames : {1, 2, 5, 12}) {
      for (const bool mixed : {false, true}) prepared(kind, frames, mixed);
    }
  }
  for (int kind = 0; kind < 3; ++kind) {
    for (const size_t frames : {1, 2, 5, 12}) {
      for (unsigned order = 0; order < 6; ++order) gated(kind, frames, order % 3 == 2, order);
    }
  }
  for (const size_t frames : {1, 5}) {
    for (const bool writing : {false, true}) gated_failures(frames, writing);
  }
  late_reads();
  for (int kind = 0; kind < 3; ++kind) {
    for (const size_t frames : {1, 2, 5, 12}) lent_reads(kind, frames);
  }
  lazy_jobs();
  for (const size_t frames : {1, 5}) prepared_failures(frames);
  dropped_in_flight();
  refusals();
  std::printf("ok\n");
  return 0;
}
