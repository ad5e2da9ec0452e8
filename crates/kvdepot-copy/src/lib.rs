//! What moves bytes between an engine's memory and the pool.
