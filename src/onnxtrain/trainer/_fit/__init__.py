"""The fit: the state that training changes, the loop over epochs, and the steps in it."""
