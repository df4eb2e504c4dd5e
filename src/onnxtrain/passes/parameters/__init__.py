"""Tell what values are for: parameters, statistics, fixed inputs, stopped gradients, training or inference."""
