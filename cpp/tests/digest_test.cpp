// The digest of a stream, given in parts whose ends fall anywhere and going on from its state; as xxhash's xxh3_128 has
// it.
#include "io/digest.h"

#include <algorithm>
#include <iterator>
#include <memory>
#include <random>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "check.h"

using offload::io::Digest;

int main() {
  std::vector<unsigned char> data(5000);
  for (size_t i = 0; i < data.size(); ++i) data[i] = static_cast<unsigned char>((i * 131 + 7) ^ (i >> 8));
  const std::pair<size_t, const char*> known[] = {
      {241, "b53840fe3fedf161956cae592c67279e"},  {1024, "efaa73720eec0a339fb9947417c15b80"},
      {1025, "d42732dbb96b6c2bfe1b47100b1d79d8"}, {1088, "85de865e94a3c6e7f8d459d5974f3cd7"},
      {2048, "dc5c874eec8efb6f650cf45cdde6160a"}, {5000, "8b9945945bc58acc35597b69007b5f47"}};
  const size_t parts[] = {0, 1, 63, 64, 65, 1023, 1024, 1025, 3000};
  std::minstd_rand chance(1);
  for (const auto& [nbytes, want] : known) {
    for (int trial = 0; trial < 200; ++trial) {
      Digest digest;
      for (size_t at = 0; at < nbytes;) {
        const size_t n = std::min(nbytes - at, parts[chance() % std::size(parts)]);
        const auto exact = std::make_unique<unsigned char[]>(n);  // so that a byte read too far is seen
        std::copy_n(data.data() + at, n, exact.get());
        digest.update(exact.get(), n);
        at += n;
        if (chance() % 2 == 0) digest = Digest::of_state(digest.state());
      }
      CHECK(digest.hex() == want);
    }
  }
  Digest few;
  few.update(data.data(), 240);
  CHECK_THROWS(std::length_error, few.hex(), "another");
  CHECK_THROWS(std::invalid_argument, Digest::of_state("x"), "no digest's state");
}
