// What most sources include. When many are compiled, this is read once for all of them (native/_build.py); no source includes it.
#include <ATen/Context.h>
#include <ATen/EmptyTensor.h>
#include <ATen/ops/_conj.h>
#include <ATen/ops/_neg_view.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/zeros.h>
#include <torch/library.h>

#include "core/graph.h"
