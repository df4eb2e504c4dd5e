// Convolutions of each channel with one filter of its own: groups = channels = outputs, two spatial axes.
#pragma once

#include "convolution/geometry.h"
#include "core/threads.h"

namespace onnxtrain::ONNXTRAIN_LEVEL {

bool is_depthwise(const Convolution& c);

void depthwise_forward(
    const Threads& threads, const Convolution& c, const float* x, const float* w, const float* bias, float* y);

// dx, dw and db from dy, x and w; those that are null are not computed.
void depthwise_gradient(const Threads& threads, const Convolution& c, const float* dy, const float* x, const float* w,
                        float* dx, float* dw, float* db);

}  // namespace onnxtrain::ONNXTRAIN_LEVEL
