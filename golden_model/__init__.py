"""Golden model of delta45: configuration, images, float reference and integer model."""
