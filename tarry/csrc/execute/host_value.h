// Values that follow from numbers alone: positions, masks made of arange.
//
// Libraries look at such values in the middle of a model, to choose between two ways of computing it. They depend on no tensor's
// contents, so the host can compute them, and what is pending stays pending: the step stays one graph, and a device that is
// busy with the step before is not waited for.
#pragma once

#include "core/graph.h"

namespace tarry {

// The contents of a pending storage on the host; undefined if they depend on any tensor's contents, if the host might compute
// something else than the device (all but integers and booleans), or if that is more work than a look is worth.
at::Tensor host_value(TarryStorage* storage);

} // namespace tarry
