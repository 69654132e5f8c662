//! Memory: addresses, what is behind them, and who may use them.

pub(crate) mod access;
pub(crate) mod backing;
pub(crate) mod mapping;
pub(crate) mod physical;
pub(crate) mod plain;
pub(crate) mod pointer;
pub(crate) mod raw;
pub(crate) mod reservation;
pub(crate) mod space;
