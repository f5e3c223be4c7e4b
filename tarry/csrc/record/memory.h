// How much memory pending work holds that eager would have freed.
//
// A leaf holds the contents that a storage had when a pending node read them. Eager lets go of them when the tensor dies or is
// filled anew from the host; here they stay until the step is computed. A loop that uploads a batch, records something with it
// and never reads a value would hold every batch. So the step is cut when
//     live + pinned  >  peak + max(budget, peak / 2)
//   live:    the bytes of all storages of the device, computed or pending: what eager holds at this line;
//   pinned:  the bytes of leaves whose storage is dead or was filled anew since: what eager has freed;
//   peak:    the greatest `live` since the last cut.
// The peak counts because a step that is recorded whole holds its saved activations to its end, where eager frees them one by
// one. That is no growth: eager has held them at once, too. An update in place (a parameter's) pins nothing: the new contents
// are written into the leaf's buffer.
//
// The rule depends on what is recorded and on nothing else, so the same loop is cut at the same lines, and each piece finds the
// program of the piece before. It is cut where an operator reads nothing that is pending, if such a one comes before twice
// as much is held: most likely between two rounds of the loop. A step may be computed while the next one is recorded, so that
// the bytes of two steps are held at most.
#pragma once

#include "core/graph.h"

namespace tarry {

void set_max_pending_bytes(int64_t bytes);
int64_t pinned_bytes(DeviceState& state); // exactly, by a walk over all that is pending. Under the lock.

// The bytes of live tensors that have no real memory yet: uninitialised, pending, or in the hands of a backend. What replaces contents
// that are still there is written over them, and takes no more.
int64_t promised_bytes(DeviceState& state);

// The storage dies, or gets contents that do not follow from its old ones: it gives up its leaf. Under the lock.
void drop_leaf(TarryStorage* storage, Graveyard& graveyard);

// Whether the step has to be cut. Called before each operator, under the lock. `reads_pending`: the operator reads a pending
// value, and would wait for the step. Where it does not, a round of the loop is likely to begin: a better place.
bool over_budget(DeviceState& state, bool reads_pending);

// How many bytes of host memory may lie unused after a cut for memory's sake. Under the lock.
int64_t allowed_holes(const DeviceState& state);
// After some such cuts, gives memory back to the system if more than that lies in holes of the heap. A result that outlives a cut
// lies between inputs that are freed with it, and glibc (seen: 2.36) does not find an aligned block of the same size in the hole
// that is left: a loop that keeps its losses would take new memory for each batch.
void give_back_holes(int64_t allowed);

} // namespace tarry
