// Convolutions as matrix products, with any number of groups.
#pragma once

#include "convolution/geometry.h"
#include "core/threads.h"

namespace onnxtrain::ONNXTRAIN_LEVEL {

// y = convolution of x with w (+ bias, which may be null).
void forward(const Threads& threads, const Convolution& c, const float* x, const float* w, const float* bias, float* y);

// dx (+ a bias for each channel of x, which may be null) from dy and w. With a bias this is a transposed convolution, whose
// input is dy.
void input_gradient(
    const Threads& threads, const Convolution& c, const float* dy, const float* w, const float* bias, float* dx);

// dw, and db unless it is null, from dy and x.
void weight_gradient(
    const Threads& threads, const Convolution& c, const float* dy, const float* x, float* dw, float* db);

}  // namespace onnxtrain::ONNXTRAIN_LEVEL
