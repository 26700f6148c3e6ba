// The scalar twin of few.h: the definition, in double precision, one output after the other.
#pragma once

#include "interface.h"

namespace regard {
namespace scalar {

template <class T>
int32_t few_as(const Few& task) {
  for (int64_t m = 0; m < task.rows; ++m)
    for (int64_t n = 0; n < task.out; ++n) {
      const T* x = static_cast<const T*>(task.x) + m * task.x_row;
      const T* weight = static_cast<const T*>(task.weight) + n * task.weight_row;
      double sum = task.bias ? static_cast<const T*>(task.bias)[n] : 0.0;
      for (int64_t k = 0; k < task.in; ++k) sum += static_cast<double>(x[k]) * weight[k];
      static_cast<T*>(task.output)[m * task.out + n] = static_cast<T>(sum);
    }
  return kFine;
}

inline int32_t few(const Few& task) {
  return task.kind == Number::kFloat64 ? few_as<double>(task) : few_as<float>(task);
}

}  // namespace scalar
}  // namespace regard
