//! The doors of a depot process.
