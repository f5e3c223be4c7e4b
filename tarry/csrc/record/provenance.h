// Where in the user's program a node was recorded: cheap enough to be always on.
//
// A *site* is a line of Python and the torch.nn.Module in which it ran, interned. Code is the user's, a library's, or internal (of
// torch, tarry or Python itself): places.py judges by the file, once for each code object.
#pragma once

#include <cstdint>
#include <string>
#include <utility>

typedef struct _object PyObject;

namespace tarry {

// The id of the innermost Python line that is not internal; in backward, that of the forward operator. 0 if unknown. It may take
// the GIL when it meets a line for the first time: call it without holding a lock.
uint32_t current_site();

// For events: as above, and the innermost line of the user's own code.
struct Place {
  uint32_t site = 0;
  uint32_t user = 0;
};
Place current_place();

// These need the GIL.
std::pair<std::string, int> site_location(uint32_t site); // file and line
std::string site_module(uint32_t site);                   // "model.blocks.3.attn", or ""
uint32_t site_without_module(uint32_t site);              // the line alone
struct PlaceText {
  std::string file; // the user's
  int line = 0;
  std::string library; // "file:line", if that is not the user's
  std::string module;
};
PlaceText describe_place(const Place& place);
void set_file_judge(PyObject* judge); // called with a file's name, gives 0: the user's, 1: a library's, 2: internal; kept for good
// Of each frame, from the inside out: its code, those of its variables that are of the type (and its first argument), its
// globals. None where Python can look by itself. (Before 3.13, frame.f_locals keeps all that it shows alive.)
PyObject* frame_variables(PyObject* type);

// "file:line in module", or "an unknown line"; takes the GIL.
std::string describe_site(uint32_t site);

} // namespace tarry
