//! Tables of the CUDA functions that are called, filled when a library is opened.
//!
//! Signatures are checked against those of `cudarc` at compile time. Status codes are numbers, since a newer library
//! may return one that `cudarc`'s enums lack.

use super::error::CudaError;
use super::library::Opened;
use cudarc::{cublaslt::sys as cublaslt, driver::sys as driver, nccl::sys as nccl, nvrtc::sys as nvrtc};
use std::ffi::{c_char, c_int, c_uchar, c_uint, c_ulonglong, c_void};

/// Declares a table of functions: those that return a status, and others that are not checked against `cudarc`.
macro_rules! functions {
    (
        $(#[$doc:meta])* $table:ident of $sys:ident returning $status:ident;
        $(fn $name:ident($($arg:ty),* $(,)?);)*
        $(else $other:ident($($other_arg:ty),*) -> $result:ty;)*
    ) => {
        $(#[$doc])*
        #[allow(non_snake_case)]
        #[derive(Clone, Copy, Debug)]
        pub(super) struct $table {
            $(pub $name: unsafe extern "C" fn($($arg),*) -> u32,)*
            $(pub $other: unsafe extern "C" fn($($other_arg),*) -> $result,)*
        }

        impl $table {
            pub(crate) fn of(library: &Opened) -> Result<$table, CudaError> {
                $(const _: unsafe fn($($arg),*) -> $sys::$status = $sys::$name;)*
                const _: () = assert!(size_of::<$sys::$status>() == size_of::<u32>());
                Ok($table {
                    // SAFETY: the signature is that of `cudarc`, as was just checked, with a status of 32 bits.
                    $($name: unsafe { library.function(stringify!($name)) }?,)*
                    // SAFETY: the signature is that of NVIDIA's header.
                    $($other: unsafe { library.function(stringify!($other)) }?,)*
                })
            }
        }
    };
}

functions! {
    /// Driver functions that every version has.
    DriverVersion of driver returning CUresult;
    fn cuInit(c_uint);
    fn cuDriverGetVersion(*mut c_int);
    else cuGetErrorName(u32, *mut *const c_char) -> u32;
    else cuGetErrorString(u32, *mut *const c_char) -> u32;
}

functions! {
    DriverFunctions of driver returning CUresult;
    fn cuDeviceGetCount(*mut c_int);
    fn cuDeviceGet(*mut driver::CUdevice, c_int);
    fn cuDeviceGetName(*mut c_char, c_int, driver::CUdevice);
    fn cuDeviceTotalMem_v2(*mut usize, driver::CUdevice);
    fn cuDeviceGetAttribute(*mut c_int, driver::CUdevice_attribute, driver::CUdevice);
    fn cuDevicePrimaryCtxRetain(*mut driver::CUcontext, driver::CUdevice);
    fn cuDevicePrimaryCtxRelease_v2(driver::CUdevice);
    fn cuCtxSetCurrent(driver::CUcontext);
    fn cuMemGetInfo_v2(*mut usize, *mut usize);
    fn cuMemAlloc_v2(*mut driver::CUdeviceptr, usize);
    fn cuMemFree_v2(driver::CUdeviceptr);
    fn cuMemHostAlloc(*mut *mut c_void, usize, c_uint);
    fn cuMemFreeHost(*mut c_void);
    fn cuMemcpyHtoDAsync_v2(driver::CUdeviceptr, *const c_void, usize, driver::CUstream);
    fn cuMemcpyDtoHAsync_v2(*mut c_void, driver::CUdeviceptr, usize, driver::CUstream);
    fn cuMemcpyDtoDAsync_v2(driver::CUdeviceptr, driver::CUdeviceptr, usize, driver::CUstream);
    fn cuMemsetD8Async(driver::CUdeviceptr, c_uchar, usize, driver::CUstream);
    fn cuStreamCreate(*mut driver::CUstream, c_uint);
    fn cuStreamDestroy_v2(driver::CUstream);
    fn cuStreamSynchronize(driver::CUstream);
    fn cuStreamWaitEvent(driver::CUstream, driver::CUevent, c_uint);
    fn cuEventCreate(*mut driver::CUevent, c_uint);
    fn cuEventRecord(driver::CUevent, driver::CUstream);
    fn cuEventDestroy_v2(driver::CUevent);
    fn cuModuleLoadData(*mut driver::CUmodule, *const c_void);
    fn cuModuleUnload(driver::CUmodule);
    fn cuModuleGetFunction(*mut driver::CUfunction, driver::CUmodule, *const c_char);
    fn cuFuncSetAttribute(driver::CUfunction, driver::CUfunction_attribute, c_int);
    fn cuLaunchKernel(
        driver::CUfunction, c_uint, c_uint, c_uint, c_uint, c_uint, c_uint, c_uint, driver::CUstream,
        *mut *mut c_void, *mut *mut c_void,
    );
    fn cuStreamBeginCapture_v2(driver::CUstream, driver::CUstreamCaptureMode);
    fn cuStreamEndCapture(driver::CUstream, *mut driver::CUgraph);
    fn cuGraphInstantiateWithFlags(*mut driver::CUgraphExec, driver::CUgraph, c_ulonglong);
    fn cuGraphLaunch(driver::CUgraphExec, driver::CUstream);
    fn cuGraphExecDestroy(driver::CUgraphExec);
    fn cuGraphDestroy(driver::CUgraph);
}

functions! {
    NvrtcFunctions of nvrtc returning nvrtcResult;
    fn nvrtcVersion(*mut c_int, *mut c_int);
    fn nvrtcCreateProgram(
        *mut nvrtc::nvrtcProgram, *const c_char, *const c_char, c_int, *const *const c_char, *const *const c_char,
    );
    fn nvrtcCompileProgram(nvrtc::nvrtcProgram, c_int, *const *const c_char);
    fn nvrtcDestroyProgram(*mut nvrtc::nvrtcProgram);
    fn nvrtcGetCUBINSize(nvrtc::nvrtcProgram, *mut usize);
    fn nvrtcGetCUBIN(nvrtc::nvrtcProgram, *mut c_char);
    fn nvrtcGetProgramLogSize(nvrtc::nvrtcProgram, *mut usize);
    fn nvrtcGetProgramLog(nvrtc::nvrtcProgram, *mut c_char);
    fn nvrtcGetNumSupportedArchs(*mut c_int);
    fn nvrtcGetSupportedArchs(*mut c_int);
    else nvrtcGetErrorString(u32) -> *const c_char;
}

functions! {
    BlasFunctions of cublaslt returning cublasStatus_t;
    fn cublasLtCreate(*mut cublaslt::cublasLtHandle_t);
    fn cublasLtDestroy(cublaslt::cublasLtHandle_t);
    fn cublasLtMatmulDescCreate(
        *mut cublaslt::cublasLtMatmulDesc_t, cublaslt::cublasComputeType_t, cublaslt::cudaDataType_t,
    );
    fn cublasLtMatmulDescDestroy(cublaslt::cublasLtMatmulDesc_t);
    fn cublasLtMatmulDescSetAttribute(
        cublaslt::cublasLtMatmulDesc_t, cublaslt::cublasLtMatmulDescAttributes_t, *const c_void, usize,
    );
    fn cublasLtMatrixLayoutCreate(*mut cublaslt::cublasLtMatrixLayout_t, cublaslt::cudaDataType_t, u64, u64, i64);
    fn cublasLtMatrixLayoutDestroy(cublaslt::cublasLtMatrixLayout_t);
    fn cublasLtMatrixLayoutSetAttribute(
        cublaslt::cublasLtMatrixLayout_t, cublaslt::cublasLtMatrixLayoutAttribute_t, *const c_void, usize,
    );
    fn cublasLtMatmulPreferenceCreate(*mut cublaslt::cublasLtMatmulPreference_t);
    fn cublasLtMatmulPreferenceDestroy(cublaslt::cublasLtMatmulPreference_t);
    fn cublasLtMatmulPreferenceSetAttribute(
        cublaslt::cublasLtMatmulPreference_t, cublaslt::cublasLtMatmulPreferenceAttributes_t, *const c_void, usize,
    );
    fn cublasLtMatmulAlgoGetHeuristic(
        cublaslt::cublasLtHandle_t, cublaslt::cublasLtMatmulDesc_t, cublaslt::cublasLtMatrixLayout_t,
        cublaslt::cublasLtMatrixLayout_t, cublaslt::cublasLtMatrixLayout_t, cublaslt::cublasLtMatrixLayout_t,
        cublaslt::cublasLtMatmulPreference_t, c_int, *mut cublaslt::cublasLtMatmulHeuristicResult_t, *mut c_int,
    );
    fn cublasLtMatmul(
        cublaslt::cublasLtHandle_t, cublaslt::cublasLtMatmulDesc_t, *const c_void, *const c_void,
        cublaslt::cublasLtMatrixLayout_t, *const c_void, cublaslt::cublasLtMatrixLayout_t, *const c_void,
        *const c_void, cublaslt::cublasLtMatrixLayout_t, *mut c_void, cublaslt::cublasLtMatrixLayout_t,
        *const cublaslt::cublasLtMatmulAlgo_t, *mut c_void, usize, cublaslt::cudaStream_t,
    );
    else cublasLtGetVersion() -> usize;
    else cublasLtGetStatusName(u32) -> *const c_char;
}

functions! {
    NcclFunctions of nccl returning ncclResult_t;
    fn ncclGetVersion(*mut c_int);
    fn ncclGetUniqueId(*mut nccl::ncclUniqueId);
    fn ncclCommInitRank(*mut nccl::ncclComm_t, c_int, nccl::ncclUniqueId, c_int);
    fn ncclCommAbort(nccl::ncclComm_t);
    fn ncclGroupStart();
    fn ncclGroupEnd();
    fn ncclSend(*const c_void, usize, nccl::ncclDataType_t, c_int, nccl::ncclComm_t, nccl::cudaStream_t);
    fn ncclRecv(*mut c_void, usize, nccl::ncclDataType_t, c_int, nccl::ncclComm_t, nccl::cudaStream_t);
    fn ncclAllReduce(
        *const c_void, *mut c_void, usize, nccl::ncclDataType_t, nccl::ncclRedOp_t, nccl::ncclComm_t, nccl::cudaStream_t,
    );
    fn ncclReduceScatter(
        *const c_void, *mut c_void, usize, nccl::ncclDataType_t, nccl::ncclRedOp_t, nccl::ncclComm_t, nccl::cudaStream_t,
    );
    fn ncclAllGather(*const c_void, *mut c_void, usize, nccl::ncclDataType_t, nccl::ncclComm_t, nccl::cudaStream_t);
    // These return a status as well, which may be unknown here.
    else ncclCommGetAsyncError(nccl::ncclComm_t, *mut u32) -> u32;
    else ncclGetErrorString(u32) -> *const c_char;
}
