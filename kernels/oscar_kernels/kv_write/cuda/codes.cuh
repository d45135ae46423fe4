// Clip, scale, codes and their bytes: what quantizer.py defines, in the operations of kernel.py.
#pragma once

#include "order.cuh"

// Scale and offset in 16 bits, saturated; `inverse` becomes 1 / range.
DEV u32 affine_word(float low, float high, float& inverse) {
  const float range = fmaxf(high - low, MIN_RANGE);
  inverse = divide(1.f, range);
  const float scale = fminf(divide(range, 3.f), LARGEST), offset = fminf(fmaxf(low, -LARGEST), LARGEST);
  return AFFINE_BF16 ? pack_bf16(scale, offset) : pack_f16(scale, offset);
}

// 0x4B000000 + code, `code = floor(3 * clamp((x - low) / range, 0, 1) + 0.5)`; code 0 for NaN.
DEV u32 code_bits(float x, float low, float inverse) {
  return bits_of(add_down(fmaf(saturate(multiply(x - low, inverse)), 3.f, 0.5f), ONE));
}

// Clips and quantizes the thread's part of row g + 8 I and stores it. The four threads of a row come together.
template <class R, int I>
DEV void store_codes(const Params& p, float (&x)[R::D / 2], float limit, long long place, bool valid, int t) {
  constexpr int N = R::D / 4, JQ = R::D / 32, EACH = N / R::G;  // values of a group in one thread
  float low[R::G], high[R::G], inverse[R::G];
  u32 words[R::G];
  bool narrow = false;
  UNROLL for (int v = 0; v < R::G; v++) {
    low[v] = high[v] = x[v * EACH / 2 * 4 + 2 * I];
    UNROLL for (int n = v * EACH; n < (v + 1) * EACH; n++) {
      low[v] = fminf(low[v], x[n / 2 * 4 + 2 * I + n % 2]);
      high[v] = fmaxf(high[v], x[n / 2 * 4 + 2 * I + n % 2]);
    }
    UNROLL for (int mask = 1; mask <= 2; mask *= 2) {
      low[v] = fminf(low[v], shuffle_xor(low[v], mask));
      high[v] = fmaxf(high[v], shuffle_xor(high[v], mask));
    }
    if (R::RANK) {
      low[v] = fminf(fmaxf(low[v], -limit), limit);
      high[v] = fmaxf(fminf(high[v], limit), -limit);
    }
    narrow |= high[v] - low[v] < MIN_RANGE;
    words[v] = affine_word(low[v], high[v], inverse[v]);
  }
  // Codes of values beyond the limit saturate by themselves, except in groups narrower than the smallest range.
  if (R::RANK && narrow) {
    UNROLL for (int n = 0; n < N; n++) {
      float& y = x[n / 2 * 4 + 2 * I + n % 2];
      y = fminf(fmaxf(y, -limit), limit);
    }
  }
  u32 bytes[JQ / 2];
  UNROLL for (int w = 0; w < JQ / 2; w++) {
    bytes[w] = 0u - 0xE7000000u;  // what 85 times 0x4B000000 leaves
    UNROLL for (int b = 0; b < 4; b++) UNROLL for (int q = 0; q < 4; q++) {
      const int j = q * JQ + 2 * w + b / 2, v = q * R::G / 4;
      bytes[w] += code_bits(x[4 * j + 2 * I + b % 2], low[v], inverse[v]) << (8 * b + 2 * q);
    }
  }
  if (!valid) return;
  store_words(p.codes + place * RECORD + R::CODES_AT + 2 * JQ * t, bytes);
  UNROLL for (int v = 0; v < R::G; v++) {
    if (t == v) store_word(p.affine + place * AFFINE + R::AFFINE_AT + 2 * v, words[v]);
  }
}

// The thread's part of row g + 8 I in bfloat16.
template <int D, int I>
DEV void store_row(u16* row, const float (&x)[D / 2], int t) {
  constexpr int JQ = D / 32;
  UNROLL for (int q = 0; q < 4; q++) {
    u32 words[JQ];
    UNROLL for (int j = 0; j < JQ; j++)
        words[j] = pack_bf16(x[4 * (q * JQ + j) + 2 * I], x[4 * (q * JQ + j) + 2 * I + 1]);
    store_words(row + q * (D / 4) + 2 * JQ * t, words);
  }
}
