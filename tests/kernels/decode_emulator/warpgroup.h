// Products of a warpgroup on a CPU, and how its threads meet.
//
// A product reads shared memory when its warp waits for it, or (`eager`) when it begins; what it adds to is NaN in
// between. Errors are a store to what it reads that no fence followed, warps whose products differ, and products that
// no `products_begin` is in front of.
#pragma once

namespace machine {

inline std::vector<Started>& started(int warpgroup) {  // products of a warpgroup, in order
  return threads[warpgroup * 128].products_of_all;
}
inline void stored(u32 address) { self().unfenced.push_back(address); }
// Number k of column n.
inline float element(u32 operand, int n, int k) {
  const u32 step = operand >> 16 << 4, address = (operand & 0x3FFF) << 4;
  u16 x;
  memcpy(&x, at(address + n / 8 * 256 + k / 8 * step + n % 8 * 16 + k % 8 * 2, 2), 2);
  return from_float16(x);
}
inline void read_columns(Product& product) {
  const u32 begin = (product.operand & 0x3FFF) << 4, end = begin + product.numbers * 64;
  for (const Thread& t : threads)
    for (u32 address : t.unfenced)
      check(address + 16 <= begin || address >= end, "a product reads what no fence followed");
  for (int j = 0; j < product.numbers / 2; j++)
    for (int k = 0; k < 16; k++)
      product.columns.push_back(element(product.operand, j / 2 * 8 + current % 4 * 2 + j % 2, k));
}
inline void finish(Product& product) {
  if (product.columns.empty()) read_columns(product);
  std::vector<float>& x = self().sums.at(product.x);
  for (int i = 0; i < product.numbers; i++) {
    double sum = product.more ? x[i] : 0.0;
    const float* column = &product.columns[(i / 4 * 2 + i % 2) * 16];
    for (int k = 0; k < 16; k++) sum += (double)product.rows[i / 2 % 2][k] * column[k];
    x[i] = (float)sum;
  }
}

}  // namespace machine

template <int N>
DEV void shared_store(u32 at, const u32 (&x)[N]) {
  memcpy(machine::at(at, 4 * N), x, 4 * N);
  machine::stored(at);
}
template <int N>
DEV void stmatrix_trans(u32 at, const u32 (&x)[N]) {
  u32 to[32];
  memcpy(to, machine::exchange(at, 30 + N), sizeof to);
  const int lane = machine::current % 32;
  for (int i = 0; i < N; i++)
    for (int e = 0; e < 2; e++) {
      const u16 y = machine::half(x[i], e);
      memcpy(machine::at(to[8 * i + lane % 4 * 2 + e], 16) + lane / 4 * 2, &y, 2);
    }
  for (int i = 0; i < 8 * N; i++) machine::stored(to[i]);
}
DEV void group_sync(int id) { machine::arrive_and_wait(id, 128); }
DEV bool group_any(int id, bool x) { return machine::arrive_and_wait(id, 128, x); }
DEV void fence_for_products() { machine::self().unfenced.clear(); }
DEV u32 operand(u32 at) { return (at >> 4 & 0x3FFF) + (8u << 16); }
DEV void products_begin() { machine::self().ordered = true; }
template <int N>
DEV void group_multiply(float (&x)[N], const u32 (&a)[4], u32 operand, bool more) {
  machine::Thread& t = machine::self();
  machine::check(t.ordered, "no products_begin in front of a product");
  auto& others = machine::started(machine::current / 128);
  if (t.started == (int)others.size()) others.push_back({operand, N, more});
  const machine::Started& same = others[t.started++];
  machine::check(same.operand == operand && same.numbers == N && same.more == more, "warps whose products differ");
  machine::Product product{x, N, more, {}, {}, operand, t.batches};
  const auto all = machine::exchange(a, 40);
  const int first = machine::current % 32 / 4 * 4;
  for (int i = 0; i < 4; i++)
    for (int k = 0; k < 8; k++)
      product.rows[i % 2][i / 2 * 8 + k] = machine::from_float16(machine::half(all[i][first + k / 2], k % 2));
  if (machine::eager) machine::read_columns(product);
  t.sums.try_emplace(x, x, x + N);
  for (float& y : x) y = NAN;
  t.products.push_back(product);
}
DEV void products_commit() {
  machine::self().batches++;
  machine::self().ordered = false;
}
template <int N>
DEV void products_wait() {
  machine::exchange(0, 41);
  machine::Thread& t = machine::self();
  std::vector<machine::Product> later;
  for (machine::Product& product : t.products)
    if (product.batch + N < t.batches)
      machine::finish(product);
    else
      later.push_back(product);
  t.products = later;
  for (auto sum = t.sums.begin(); sum != t.sums.end();) {
    const bool going = std::any_of(later.begin(), later.end(), [&](auto& product) { return product.x == sum->first; });
    if (!going) std::copy(sum->second.begin(), sum->second.end(), sum->first);
    sum = going ? std::next(sum) : t.sums.erase(sum);
  }
}
template <class T, int N>
DEV void settled(T (&)[N]) {}
