// Integers that depend on symbols: sums of products. See tarry/ir/sizes.py.
#pragma once

#include <cstdint>
#include <vector>

namespace tarry {

struct Term {
  int64_t factor;
  std::vector<uint32_t> symbols; // to be multiplied, as often as they stand here
};

using Polynomial = std::vector<Term>;

inline int64_t value_of(const Polynomial& polynomial, const std::vector<int64_t>& symbols) {
  int64_t sum = 0;
  for (const Term& term : polynomial) {
    int64_t product = term.factor;
    for (const uint32_t symbol : term.symbols) {
      product *= symbols[symbol];
    }
    sum += product;
  }
  return sum;
}

inline std::vector<int64_t> values_of(const std::vector<Polynomial>& polynomials, const std::vector<int64_t>& symbols) {
  std::vector<int64_t> values;
  values.reserve(polynomials.size());
  for (const Polynomial& polynomial : polynomials) {
    values.push_back(value_of(polynomial, symbols));
  }
  return values;
}

// As Python writes them down.
using RawPolynomials = std::vector<std::vector<std::pair<int64_t, std::vector<uint32_t>>>>;

inline std::vector<Polynomial> to_polynomials(const RawPolynomials& raw) {
  std::vector<Polynomial> made;
  for (const auto& terms : raw) {
    auto& polynomial = made.emplace_back();
    for (const auto& [factor, symbols] : terms) {
      polynomial.push_back({factor, symbols});
    }
  }
  return made;
}

} // namespace tarry
