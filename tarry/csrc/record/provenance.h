// Where in the user's program a node was recorded: cheap enough to be always on.
#pragma once

#include <cstdint>
#include <string>
#include <utility>

namespace tarry {

// The id of the innermost Python line that is neither torch's nor tarry's; in backward, that of the forward operator.
// 0 if unknown. It may take the GIL when it meets a line for the first time: call it without holding a lock.
uint32_t current_site();
// File and line of a site; needs the GIL.
std::pair<std::string, int> site_location(uint32_t site);
// "file:line", or "an unknown line"; takes the GIL.
std::string describe_site(uint32_t site);
// Code under this directory is not the user's; needs the GIL.
void add_internal_path(const std::string& prefix);

} // namespace tarry
