"""The planners that a user can name: `auto`, `tensile`, `capuchin`, `vdnn`, `checkpoint` and `none`."""
