"""Networks for images, and their presets."""
