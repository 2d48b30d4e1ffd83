// One contract for every engine: what was written is read back, whatever the sizes, offsets, addresses and faults.
#include <fcntl.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <functional>
#include <random>
#include <thread>
#include <vector>

#include "check.h"
#include "io/channel.h"
#include "io/checksum.h"
#include "io/faults.h"
#include "io/threads.h"
#include "io/uring.h"
#include "scratch.h"

using namespace offload::io;

namespace {

using MakeEngine = std::function<std::shared_ptr<Engine>(EngineOptions)>;

std::shared_ptr<Engine> own(Engine* engine) { return std::shared_ptr<Engine>(engine, discard); }

std::vector<unsigned char> random_bytes(size_t count, unsigned seed) {
  std::vector<unsigned char> bytes(count);
  std::mt19937 random(seed);
  for (unsigned char& byte : bytes) byte = static_cast<unsigned char>(random());
  return bytes;
}

// Rounds of random transfers that share blocks but no bytes, all in flight at once; then everything is read back.
void round_trips(const MakeEngine& make, bool direct, EngineOptions options, bool checked = false) {
  Scratch scratch;
  constexpr size_t kFileBytes = (1 << 20) + 777;
  const Channel channel{make(options), std::make_shared<File>(scratch.file("a"), kFileBytes, direct, checked)};
  std::vector<unsigned char> model(kFileBytes);
  std::mt19937 random(7);
  constexpr size_t kSizes[] = {0, 1, 511, 512, 513, 1023, 1025, 4095, 4096, 4097, 65536, 300001};
  for (int round = 0; round < 4; ++round) {
    std::vector<std::vector<unsigned char>> buffers;
    std::vector<std::shared_ptr<Transfer>> transfers;
    size_t offset = random() % 5000;
    while (true) {
      const size_t nbytes = random() % 3 ? kSizes[random() % std::size(kSizes)] : random() % 20000;
      if (offset + nbytes > kFileBytes) break;
      const size_t shift = random() % 65;
      buffers.push_back(random_bytes(nbytes + shift, static_cast<unsigned>(random())));
      if (nbytes) std::memcpy(model.data() + offset, buffers.back().data() + shift, nbytes);
      transfers.push_back(channel.write(offset, buffers.back().data() + shift, nbytes));
      offset += nbytes + (random() % 2 ? 0 : random() % 3000);
    }
    for (const auto& transfer : transfers) transfer->wait();
    transfers.clear();
    std::vector<unsigned char> back(kFileBytes + 64);
    const size_t shift = random() % 64;
    for (size_t at = 0; at < kFileBytes;) {
      const size_t nbytes = std::min<size_t>(1 + random() % 200000, kFileBytes - at);
      transfers.push_back(channel.read(at, back.data() + shift + at, nbytes));
      at += nbytes;
    }
    for (const auto& transfer : transfers) transfer->wait();
    // Bytes that nobody wrote read as zeros.
    CHECK(std::memcmp(model.data(), back.data() + shift, kFileBytes) == 0);
  }
}

void large_aligned(const MakeEngine& make) {
  Scratch scratch;
  constexpr size_t kBytes = 24 << 20;
  const Channel channel{make({4, 1 << 20}), std::make_shared<File>(scratch.file("a"), kBytes, true)};
  Buffer out, in;
  out.reserve(kBytes);
  in.reserve(kBytes);
  const auto bytes = random_bytes(kBytes, 3);
  std::memcpy(out.data(), bytes.data(), kBytes);
  channel.write(0, out.data(), kBytes)->wait();
  channel.read(0, in.data(), kBytes)->wait();
  CHECK(std::memcmp(in.data(), bytes.data(), kBytes) == 0);
  const Counters counters = channel.engine->counters();
  CHECK(counters.bytes_read == kBytes && counters.bytes_written == kBytes && counters.requests == 2);
}

// A file that became shorter behind our back: an error at the transfer's own wait, not stale bytes.
void short_file(const MakeEngine& make, bool direct) {
  Scratch scratch;
  const std::string path = scratch.file("a");
  const Channel channel{make({8, 65536}), std::make_shared<File>(path, 1 << 20, direct)};
  CHECK(::truncate(path.c_str(), 500000) == 0);
  std::vector<char> bytes(1 << 20);
  auto good = channel.read(0, bytes.data(), 400000);
  auto bad = channel.read(400000, bytes.data() + 400000, 200000);
  good->wait();
  CHECK_THROWS(IoError, bad->wait(), path);
  CHECK_THROWS(IoError, bad->wait(), "the file ends at");
  CHECK(bad->done());
}

// A bit that changes on the disk is found by whatever read covers it, wherever in a transfer it is, and named.
void changed_on_disk(const MakeEngine& make, bool direct) {
  Scratch scratch;
  const std::string path = scratch.file("a");
  const auto file = std::make_shared<File>(path, 100000, direct, true);
  const Channel channel{make({4, 8192}), file};
  const auto bytes = random_bytes(100000, 5);
  auto* const data = const_cast<unsigned char*>(bytes.data());
  // Two neighbours that share a block, and the end of a file that is no multiple of one.
  channel.write(100, data + 100, 20000)->wait();
  channel.write(20100, data + 20100, 79900)->wait();
  std::vector<unsigned char> back(100000);
  for (const size_t at : {size_t{100}, size_t{4095}, size_t{5000}, size_t{20099}, size_t{20100}, size_t{99999}}) {
    const int fd = ::open(path.c_str(), O_RDWR);
    CHECK(fd >= 0);
    unsigned char byte = bytes[at] ^ 1;
    CHECK(::pwrite(fd, &byte, 1, static_cast<off_t>(at)) == 1 && ::fdatasync(fd) == 0);
    const std::string name =
        " to " + std::to_string(std::min<size_t>(at < 20100 && at >= 16384 ? 20100 : (at / 4096 + 1) * 4096, 100000));
    CHECK_THROWS(IoError, channel.read(at, back.data(), 1)->wait(), name);
    CHECK_THROWS(IoError, channel.read(at, back.data(), 1)->wait(), "are not what was written there");
    CHECK_THROWS(IoError, channel.read(100, back.data(), 99900)->wait(), path);
    CHECK(::pwrite(fd, &bytes[at], 1, static_cast<off_t>(at)) == 1 && ::fdatasync(fd) == 0);
    ::close(fd);
    channel.read(100, back.data(), 99900)->wait();
    CHECK(std::memcmp(back.data(), data + 100, 99900) == 0);
  }
  // All but the first 100 bytes, which nobody wrote.
  const uint64_t before = channel.engine->counters().bytes_verified;
  channel.read(0, back.data(), 100000)->wait();
  CHECK(channel.engine->counters().bytes_verified - before == 99900);
  CHECK(file->sums()->nbytes() > 0);
}

// Who writes the same bytes twice at once may find either, but no error.
void overlapping(const MakeEngine& make) {
  Scratch scratch;
  const Channel channel{make({8, 4096}), std::make_shared<File>(scratch.file("a"), 1 << 18, true, true)};
  auto one = random_bytes(1 << 18, 1);
  auto two = random_bytes(1 << 18, 2);
  for (int round = 0; round < 4; ++round) {
    auto a = channel.write(0, one.data(), one.size());
    auto b = channel.write(0, two.data(), two.size());
    a->wait();
    b->wait();
    std::vector<unsigned char> back(one.size());
    channel.read(0, back.data(), back.size())->wait();
    for (size_t i = 0; i < back.size(); ++i) CHECK(back[i] == one[i] || back[i] == two[i]);
  }
}

void memory_registered(const MakeEngine& make) {
  Scratch scratch;
  const Channel channel{make({4, 65536}), std::make_shared<File>(scratch.file("a"), 1 << 20, true, true)};
  auto memory = std::make_shared<Buffer>();
  memory->reserve(3 << 20);
  const std::weak_ptr<Buffer> watch = memory;
  const bool taken = channel.engine->register_memory(memory->data(), 2 << 20, memory);
  const auto bytes = random_bytes(1 << 20, 9);
  std::memcpy(memory->data(), bytes.data(), bytes.size());
  channel.write(0, memory->data(), 1 << 20)->wait();
  // Inside, across its end, and outside of what is registered.
  for (const size_t at : {size_t{1} << 20, (size_t{3} << 19) + 4096, size_t{2} << 20}) {
    channel.read(0, memory->data() + at, 1 << 20)->wait();
    CHECK(std::memcmp(memory->data() + at, bytes.data(), bytes.size()) == 0);
  }
  memory.reset();
  CHECK(watch.expired() == !taken);
  channel.engine->close();
  CHECK(watch.expired());
  CHECK(!channel.engine->register_memory(nullptr, 0, nullptr));
}

void many_callers(const MakeEngine& make) {
  Scratch scratch;
  constexpr size_t kPart = 40000;
  const Channel channel{make({3, 4096}), std::make_shared<File>(scratch.file("a"), 8 * kPart, true)};
  std::vector<std::thread> callers;
  for (unsigned i = 0; i < 8; ++i) {
    callers.emplace_back([&channel, i] {
      const auto bytes = random_bytes(kPart, i);
      std::vector<unsigned char> back(kPart);
      for (int round = 0; round < 5; ++round) {
        channel.write(i * kPart, const_cast<unsigned char*>(bytes.data()), kPart)->wait();
        channel.read(i * kPart, back.data(), kPart)->wait();
        CHECK(bytes == back);
      }
    });
  }
  for (std::thread& caller : callers) caller.join();
}

void close_in_flight(const MakeEngine& make) {
  Scratch scratch;
  const Channel channel{make({2, 4096}), std::make_shared<File>(scratch.file("a"), 8 << 20, true)};
  auto bytes = std::make_shared<std::vector<char>>(8 << 20, 'x');
  const std::weak_ptr<std::vector<char>> watch = bytes;
  std::atomic<int> calls{0};
  channel.engine->submit(channel.file, true, 0, bytes->data(), bytes->size(), bytes, [&](const Transfer&) { ++calls; });
  bytes.reset();  // the transfer, dropped by its caller, keeps them
  channel.engine->close();
  channel.engine->close();
  CHECK(calls == 1);
  CHECK(watch.expired());
  char byte = 0;
  CHECK_THROWS(std::runtime_error, channel.read(0, &byte, 1), "closed");
}

void ranges_and_growth(const MakeEngine& make) {
  Scratch scratch;
  const std::string path = scratch.file("a");
  const Channel channel{make({}), std::make_shared<File>(path, 10000, true)};
  char byte = 7;
  CHECK_THROWS(std::out_of_range, channel.read(10000, &byte, 1), "outside");
  CHECK_THROWS(std::out_of_range, channel.read(UINT64_MAX, &byte, 2), "outside");
  CHECK_THROWS(std::out_of_range, channel.write(1, &byte, UINT64_MAX), "outside");
  channel.read(10000, &byte, 0)->wait();
  channel.file->grow(20000);
  channel.write(19999, &byte, 1)->wait();
  byte = 0;
  channel.read(19999, &byte, 1)->wait();
  CHECK(byte == 7);
  struct stat info;
  CHECK(::stat(path.c_str(), &info) == 0 && (info.st_mode & 0777) == 0600 && info.st_size == 20000);
}

[[maybe_unused]] void forked_child(const MakeEngine& make) {
  Scratch scratch;
  Channel channel{make({}), std::make_shared<File>(scratch.file("a"), 4096, true)};
  const pid_t child = ::fork();
  CHECK(child >= 0);
  if (child == 0) {
    char byte = 0;
    bool refused = false;
    try {
      channel.read(0, &byte, 1);
    } catch (const std::runtime_error&) {
      refused = true;
    }
    channel.engine->close();
    channel.engine.reset();
    std::_Exit(refused ? 0 : 1);
  }
  int status = 0;
  CHECK(::waitpid(child, &status, 0) == child);
  CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0);
}

void contract(const char* name, const MakeEngine& make) {
  std::printf("%s\n", name);
  for (const bool direct : {true, false}) {
    round_trips(make, direct, {32, 1 << 20});
    round_trips(make, direct, {1, 4096});
    round_trips(make, direct, {5, 8192});
    round_trips(make, direct, {32, 1 << 20}, true);
    round_trips(make, direct, {5, 8192}, true);
    changed_on_disk(make, direct);
    short_file(make, direct);
  }
  large_aligned(make);
  memory_registered(make);
  overlapping(make);
  many_callers(make);
  close_in_flight(make);
  ranges_and_growth(make);
#if !defined(__SANITIZE_THREAD__)
  forked_child(make);
#endif
}

void failures() {
  for (const bool direct : {true, false}) {
    Scratch scratch;
    Faults faults;
    faults.read_errno = EIO;
    faults.write_errno = ENOSPC;
    faults.bad_begin = 100000;
    faults.bad_end = 100001;
    const Channel channel{own(new FaultEngine({4, 4096}, faults)),
                          std::make_shared<File>(scratch.file("a"), 1 << 20, direct)};
    std::vector<char> bytes(1 << 20, 'a');
    auto before = channel.write(0, bytes.data(), 90000);
    auto bad = channel.write(90000, bytes.data() + 90000, 20000);
    auto after = channel.write(120000, bytes.data() + 120000, 900000);
    auto bad_read = channel.read(99999, bytes.data() + 99999, 2);
    before->wait();
    after->wait();
    CHECK_THROWS(IoError, bad->wait(), "write of 20000 bytes at offset 90000 of ");
    CHECK_THROWS(IoError, bad->wait(), "ENOSPC");
    CHECK_THROWS(IoError, bad_read->wait(), "EIO");
    channel.engine->drain();
  }
}

void order_held() {
  Scratch scratch;
  const auto engine = std::make_shared<FaultEngine>(EngineOptions{1, 4096}, Faults{});
  const Channel channel{engine, std::make_shared<File>(scratch.file("a"), 1 << 20, true)};
  std::vector<char> bytes(8192);
  std::vector<int> order;
  std::vector<std::shared_ptr<Transfer>> transfers;
  engine->hold();
  for (int i = 0; i < 50; ++i) {
    transfers.push_back(channel.read(8192u * static_cast<unsigned>(i), bytes.data(), 8192, nullptr,
                                     [&order, i](const Transfer&) { order.push_back(i); }));
  }
  CHECK(!transfers.front()->done());
  CHECK(!transfers.front()->wait_for(std::chrono::milliseconds(1)));
  engine->release();
  engine->drain();
  CHECK(std::is_sorted(order.begin(), order.end()) && order.size() == 50);  // one in flight: first in, first out
}

// Nothing comes back: whoever waits is told what is pending, and gets the bytes when it does come.
void stuck_device() {
  Scratch scratch;
  const auto engine = std::make_shared<FaultEngine>(EngineOptions{1, 4096, 0.02}, Faults{});
  const Channel channel{engine, std::make_shared<File>(scratch.file("a"), 1 << 20, true)};
  std::vector<char> bytes(1 << 20);
  engine->hold();
  auto first = channel.write(4096, bytes.data(), 8192);
  auto second = channel.read(0, bytes.data() + 8192, 1);
  CHECK_THROWS(IoError, second->wait(), "read of 1 bytes at offset 0 of ");
  CHECK_THROWS(IoError, second->wait(), "write of 4096 bytes at offset 4096 of ");
  CHECK_THROWS(IoError, first->wait(), "2 transfers wait behind");
  CHECK_THROWS(IoError, engine->drain(), "cannot finish its work");
  CHECK(!first->done() && !second->done());
  for (size_t i = 2; i < Engine::kBacklogMax; ++i) channel.read(0, bytes.data() + 8192, 1);
  CHECK_THROWS(IoError, channel.read(0, bytes.data() + 8192, 1), "cannot be queued");
  CHECK(engine->counters().in_flight == 1 && engine->counters().waiting == Engine::kBacklogMax);
  engine->release();
  first->wait();
  second->wait();
  engine->drain();
  CHECK(engine->counters().in_flight == 0 && engine->counters().waiting_max == Engine::kBacklogMax);
  CHECK_THROWS(std::invalid_argument, ThreadEngine({1, 4096, 0}), "stuck");
}

void sums_and_latencies() {
  const auto bytes = random_bytes(5000, 1);
  for (size_t shift = 0; shift < 9; ++shift) {
    for (size_t nbytes = 0; nbytes < 300; ++nbytes) {
      CHECK(checksum(bytes.data() + shift, nbytes) == checksum_by_table(bytes.data() + shift, nbytes));
    }
  }
  const uint32_t sum = checksum(bytes.data(), 4096);
  for (size_t bit = 0; bit < 8 * 4096; ++bit) {
    auto flipped = bytes;
    flipped[bit / 8] ^= static_cast<unsigned char>(1u << bit % 8);
    CHECK(checksum(flipped.data(), 4096) != sum);
  }
  Histogram histogram;
  CHECK(histogram.percentile(50) == 0);
  for (uint64_t us = 1; us <= 1000; ++us) histogram.add(us * us);
  for (const unsigned percent : {1u, 10u, 50u, 90u, 99u, 100u}) {
    const uint64_t exact = uint64_t{percent} * 10 * percent * 10;
    CHECK(histogram.percentile(percent) >= exact && histogram.percentile(percent) <= exact + exact / 8);
  }
  histogram.add(UINT64_MAX);
  CHECK(histogram.max() == UINT64_MAX && histogram.percentile(100) == UINT64_MAX && histogram.count() == 1001);
}

void bad_files() {
  Scratch scratch;
  CHECK_THROWS(IoError, File("/nowhere/at/all", 1, true), "/nowhere/at/all");
  CHECK_THROWS(IoError, File("/dev/null", 1, true), "no regular file");
  const std::string path = scratch.file("huge");
  CHECK_THROWS(IoError, File(path, uint64_t{1} << 60, true), path);
  CHECK(::access(path.c_str(), F_OK) != 0);  // what it made is gone again
  CHECK_THROWS(std::invalid_argument, ThreadEngine({0, 4096}), "queue_depth");
  CHECK_THROWS(std::invalid_argument, ThreadEngine({1, 1000}), "block");
}

}  // namespace

int main() {
  try {
    contract("io_uring", [](EngineOptions options) { return own(make_uring_engine(options).release()); });
  } catch (const Unavailable& error) {
    std::printf("io_uring is not here: %s\n", error.what());
  }
  contract("threads", [](EngineOptions options) { return own(new ThreadEngine(options)); });
  contract("faults", [](EngineOptions options) {
    Faults faults;
    faults.seed = 11;
    faults.short_rate = 0.4;
    faults.interrupt_rate = 0.3;
    faults.delay_rate = 0.05;
    faults.delay_us_max = 300;
    faults.reorder_rate = 0.2;
    return own(new FaultEngine(options, faults));
  });
  failures();
  order_held();
  stuck_device();
  sums_and_latencies();
  bad_files();
  std::printf("ok\n");
  return 0;
}
