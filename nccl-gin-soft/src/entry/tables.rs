//! The exported tables.

use super::older::{
    connect_v12, create_context_v12, create_context_v13, iput_signal_v12, iput_v12, progress_v12,
    query_last_error_v12, reg_dma_buf_v13, reg_v13,
};
use super::operations::{iflush, iget, iput, iput_signal, iput_signal_v14, progress, query_last_error, test};
use super::{
    NAME, close_coll, close_listen, connect, create_context_v14, dereg_mr_sym, destroy_context, devices,
    finalize, get_properties, get_properties_v11, init, listen, reg_dma_buf_v14, reg_v14,
};
use crate::abi::gin_v12::GinV12;
use crate::abi::gin_v13::GinV13;
use crate::abi::rma_v14::RmaV14;

/// `ncclRmaPlugin_v14`: 2.30.5 and later.
#[unsafe(export_name = "ncclRmaPlugin_v14")]
pub static RMA_V14: RmaV14 = RmaV14 {
    name: NAME.as_ptr(),
    init,
    devices,
    get_properties,
    listen,
    connect,
    create_context: create_context_v14,
    reg_mr_sym: reg_v14,
    reg_mr_sym_dma_buf: reg_dma_buf_v14,
    dereg_mr_sym,
    destroy_context,
    close_coll,
    close_listen,
    iput,
    iput_signal: iput_signal_v14,
    iget,
    iflush,
    test,
    progress,
    query_last_error,
    finalize,
};

/// `ncclGinPlugin_v13`: 2.30.3 and 2.30.4.
#[unsafe(export_name = "ncclGinPlugin_v13")]
pub static GIN_V13: GinV13 = GinV13 {
    name: NAME.as_ptr(),
    init,
    devices,
    get_properties,
    listen,
    connect,
    create_context: create_context_v13,
    reg_mr_sym: reg_v13,
    reg_mr_sym_dma_buf: reg_dma_buf_v13,
    dereg_mr_sym,
    destroy_context,
    close_coll,
    close_listen,
    iput,
    iput_signal,
    iget,
    iflush,
    test,
    progress,
    query_last_error,
    finalize,
};

/// `ncclGinPlugin_v12`: 2.29.7.
#[unsafe(export_name = "ncclGinPlugin_v12")]
pub static GIN_V12: GinV12 = GinV12 {
    name: NAME.as_ptr(),
    init,
    devices,
    get_properties: get_properties_v11,
    listen,
    connect: connect_v12,
    create_context: create_context_v12,
    reg_mr_sym: reg_v13,
    reg_mr_sym_dma_buf: reg_dma_buf_v13,
    dereg_mr_sym,
    destroy_context,
    close_coll,
    close_listen,
    iput: iput_v12,
    iput_signal: iput_signal_v12,
    test,
    progress: progress_v12,
    query_last_error: query_last_error_v12,
    finalize,
};
