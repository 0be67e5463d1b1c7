// What the emulator has beyond the CUDA runtime's API.
#pragma once

#include <string>

// Takes what the process has reported since the last call: what went to stderr.
std::string emuReports();
