// The dropout generator of ops/dropout/reference.py, bit for bit. Also compiles as host C++.
#pragma once
#include "ridgeline/common.cuh"

namespace rl {

struct DropoutKeys {
  u32 key_0, key_1;
};
struct DropoutWords {
  u32 word_0, word_1;
};

RL_HD u32 dropout_mix(u32 x) {
  x = (x ^ (x >> 16)) * 0x85EBCA6Bu;
  x = (x ^ (x >> 13)) * 0xC2B2AE35u;
  return x ^ (x >> 16);
}

// What a launch shares: the part of the keys that comes from seed, step and site.
RL_HD DropoutKeys dropout_site(i64 seed, i64 step, u32 site) {
  const u32 low = static_cast<u32>(seed), high = static_cast<u32>(static_cast<u64>(seed) >> 32);
  DropoutKeys keys{0x243F6A88u, 0x85A308D3u};
  keys.key_0 = dropout_mix(dropout_mix(dropout_mix(dropout_mix(keys.key_0 ^ low) ^ high) ^ static_cast<u32>(step)) ^ site);
  keys.key_1 = dropout_mix(dropout_mix(dropout_mix(dropout_mix(keys.key_1 ^ low) ^ high) ^ static_cast<u32>(step)) ^ site);
  return keys;
}

// The keys of one stream: a sample, or for attention sample · H + head.
RL_HD DropoutKeys dropout_stream(DropoutKeys site, u32 stream) {
  return {dropout_mix(site.key_0 ^ stream), dropout_mix(site.key_1 ^ stream)};
}

// 64 random bits of a counter: four numbers of 15 bits, low and high half of each word.
RL_HD DropoutWords dropout_words(u32 counter, DropoutKeys keys) {
  const u64 first = static_cast<u64>(counter ^ keys.key_0) * 0xD2511F53u;
  const u32 middle = static_cast<u32>(first >> 32) ^ static_cast<u32>(first) ^ keys.key_1;
  const u64 second = static_cast<u64>(middle) * 0xCD9E8D57u;
  const u32 high = static_cast<u32>(second >> 32), low = static_cast<u32>(second);
  return {high ^ low, middle + ((low << 15) | (low >> 17))};
}

// Decisions for a word's two numbers at once: bit 15 (low half) and bit 31 (high half) say "keep".
// `bias` is (2^15 - threshold) in both halves.
RL_HD u32 dropout_keep_bits(u32 word, u32 bias) { return (word & 0x7fff7fffu) + bias; }
RL_HD constexpr u32 dropout_bias(u32 threshold) { return (0x8000u - threshold) * 0x00010001u; }

}  // namespace rl
