"""A step as a program: instructions, schedules, lowering, check, simulation. Pure: no torch, no device."""
