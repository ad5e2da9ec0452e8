//! Pool, index, tasks and pipeline of a depot, and the client of its local door.
