// 128-bit hashing that is the same in every process: it sees names and values, never addresses.
#pragma once

#include <cstdint>
#include <cstring>
#include <string_view>

namespace tarry {

struct Hash128 {
  uint64_t lo = 0x9ae16a3b2f90404fULL;
  uint64_t hi = 0xc949c7defeed1234ULL;
  bool operator==(const Hash128& other) const { return lo == other.lo && hi == other.hi; }
  bool operator!=(const Hash128& other) const { return !(*this == other); }
};

inline uint64_t fold_multiply(uint64_t a, uint64_t b) {
  __extension__ using wide = unsigned __int128;
  const wide product = static_cast<wide>(a) * b;
  return static_cast<uint64_t>(product) ^ static_cast<uint64_t>(product >> 64);
}

// Two lanes with different constants; the second also takes in the first, so that one lane's collision is not the other's.
inline Hash128 mix(Hash128 hash, uint64_t word) {
  hash.lo = fold_multiply(hash.lo ^ word, 0xa0761d6478bd642fULL) + 0x8ebc6af09c88c6e3ULL;
  hash.hi = fold_multiply(hash.hi + word, 0xe7037ed1a0b428dbULL) ^ (hash.lo << 23 | hash.lo >> 41);
  return hash;
}

inline Hash128 mix(Hash128 hash, Hash128 other) {
  return mix(mix(hash, other.lo), other.hi);
}

inline Hash128 mix(Hash128 hash, std::string_view text) {
  hash = mix(hash, static_cast<uint64_t>(text.size()));
  while (!text.empty()) {
    uint64_t word = 0;
    const size_t n = text.size() < 8 ? text.size() : 8;
    std::memcpy(&word, text.data(), n);
    hash = mix(hash, word);
    text.remove_prefix(n);
  }
  return hash;
}

struct HashOfHash {
  size_t operator()(const Hash128& hash) const { return hash.lo; }
};

} // namespace tarry
