"""Tell parameters from constants and settings of ops, move them between initializers and inputs, and set op modes."""
