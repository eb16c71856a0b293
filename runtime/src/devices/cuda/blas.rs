//! Matmuls by cuBLASLt. A description is prepared once, with the algorithm that the library ranks first, and called
//! many times.

use super::context::Stream;
use super::error::CudaError;
use super::functions::BlasFunctions;
use super::gemm::{Gemm, Starts, Stored, alignment, gemm};
use super::library::{Kind, Search};
use crate::tape::MatmulCall;
use altiplano_ir::dtype::DType;
use cudarc::cublaslt::sys::{
    self, cublasComputeType_t as Compute, cublasLtMatmulDescAttributes_t as Of,
    cublasLtMatmulPreferenceAttributes_t as Preference, cublasLtMatrixLayoutAttribute_t as LayoutOf,
    cudaDataType_t as Data,
};
use std::collections::HashMap;
use std::ffi::{CStr, c_void};
use std::mem::MaybeUninit;
use std::ptr::{addr_of, from_ref, null_mut};

/// Precision of single-precision products; TF32 tensor cores use eleven bits of the mantissa.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum SinglePrecision {
    #[default]
    Full,
    Tf32,
}

/// Types of the operands and the result.
type Types = [DType; 3];

/// Alignment in bytes of the left operand, the right one and the result.
type Alignments = [u32; 3];

/// cuBLASLt for one device, used by one thread at a time.
#[derive(Debug)]
pub(crate) struct Blas {
    functions: BlasFunctions,
    handle: sys::cublasLtHandle_t,
    precision: SinglePrecision,
    /// Workspace limit for algorithms.
    workspace_bytes: u64,
    prepared: HashMap<(Gemm, Types, Alignments), Prepared>,
}

// SAFETY: the handle may be used by any thread, one at a time, which `&mut self` ensures.
unsafe impl Send for Blas {}

/// The addresses of one call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Addresses {
    pub lhs: u64,
    pub rhs: u64,
    pub result: u64,
    /// Workspace of at least the size that the library was given.
    pub workspace: u64,
}

/// A description as library handles, which [`Blas`] destroys.
#[derive(Clone, Copy, Debug)]
struct Prepared {
    operation: sys::cublasLtMatmulDesc_t,
    /// Layouts of `a`, `b` and `c`.
    layouts: [sys::cublasLtMatrixLayout_t; 3],
    algorithm: sys::cublasLtMatmulAlgo_t,
    workspace_bytes: usize,
    /// True if scaling factors are in double precision.
    double: bool,
}

impl Blas {
    /// Enough for the algorithms of Hopper, by NVIDIA's advice.
    pub(crate) const WORKSPACE_BYTES: u64 = 32 << 20;

    /// Opens cuBLASLt. The device's context must be current.
    pub(crate) fn open(search: &Search, precision: SinglePrecision) -> Result<Blas, CudaError> {
        let functions = BlasFunctions::of(&search.open(Kind::CublasLt)?)?;
        let mut handle = null_mut();
        // SAFETY: the call writes a handle.
        done(&functions, "cublasLtCreate", unsafe { (functions.cublasLtCreate)(&mut handle) })?;
        let workspace_bytes = Blas::WORKSPACE_BYTES;
        Ok(Blas { functions, handle, precision, workspace_bytes, prepared: HashMap::new() })
    }

    /// Prepares a call, so that running it later only launches.
    pub(crate) fn prepare(&mut self, call: &MatmulCall) -> Result<(), CudaError> {
        let (description, starts) = gemm(call);
        let types = [call.lhs.dtype, call.rhs.dtype, call.result.dtype];
        let alignments = alignments(&description, &starts, types);
        self.prepared(description, types, alignments).map(|_| ())
    }

    /// Multiplies. The addresses are those of the regions; the call says where matrices start in them.
    ///
    /// # Safety
    /// The regions must hold the matrices of the call and stay allocated until it is done.
    pub(crate) unsafe fn run(&mut self, stream: &Stream, call: &MatmulCall, at: Addresses) -> Result<(), CudaError> {
        let (description, starts) = gemm(call);
        let accumulate = description.accumulate;
        let types = [call.lhs.dtype, call.rhs.dtype, call.result.dtype];
        let alignments = alignments(&description, &starts, types);
        let prepared = self.prepared(description, types, alignments)?;
        // Scaling factors of the product and of the existing result, in the type of the sums.
        let (ones, zeros): ([u64; 2], u64) = ([1f64.to_bits(), u64::from(1f32.to_bits())], 0);
        let one = from_ref(if prepared.double { &ones[0] } else { &ones[1] }).cast::<c_void>();
        let beta = if accumulate { one } else { from_ref(&zeros).cast() };
        for Starts { lhs, rhs, result } in starts {
            let place = |address: u64, start: u64, dtype: DType| (address + start * dtype.bytes()) as *mut c_void;
            let a = place(at.rhs, rhs, types[1]).cast_const();
            let b = place(at.lhs, lhs, types[0]).cast_const();
            let c = place(at.result, result, types[2]);
            let [of_a, of_b, of_c] = prepared.layouts;
            // SAFETY: handles were prepared for these types and shapes; the caller guarantees the rest.
            let status = unsafe {
                (self.functions.cublasLtMatmul)(
                    self.handle,
                    prepared.operation,
                    one,
                    a,
                    of_a,
                    b,
                    of_b,
                    beta,
                    c.cast_const(),
                    of_c,
                    c,
                    of_c,
                    &prepared.algorithm,
                    at.workspace as *mut c_void,
                    prepared.workspace_bytes,
                    stream.raw().cast(),
                )
            };
            done(&self.functions, "cublasLtMatmul", status)?;
        }
        Ok(())
    }

    fn prepared(&mut self, g: Gemm, types: Types, alignments: Alignments) -> Result<Prepared, CudaError> {
        let key = (g, types, alignments);
        if let Some(prepared) = self.prepared.get(&key) {
            return Ok(*prepared);
        }
        let prepared = self.make(&key.0, types, alignments)?;
        self.prepared.insert(key, prepared);
        Ok(prepared)
    }

    fn make(&self, g: &Gemm, types: Types, alignments: Alignments) -> Result<Prepared, CudaError> {
        let f = &self.functions;
        let unsupported = || CudaError::UnsupportedMatmul { types: types.map(|t| t.to_string()).join(" x ") };
        let (compute, scale) = match types {
            [DType::F64, DType::F64, DType::F64] => (Compute::CUBLAS_COMPUTE_64F, Data::CUDA_R_64F),
            [DType::F32, DType::F32, DType::F32] if self.precision == SinglePrecision::Tf32 => {
                (Compute::CUBLAS_COMPUTE_32F_FAST_TF32, Data::CUDA_R_32F)
            }
            // Operands have one type. The result has it as well, or is unrounded.
            [l, r, result] if l == r && (result == l || result == DType::F32) && l != DType::F64 => {
                (Compute::CUBLAS_COMPUTE_32F, Data::CUDA_R_32F)
            }
            _ => return Err(unsupported()),
        };
        let [lhs, rhs, result] = types.map(data);
        let (lhs, rhs, result) =
            (lhs.ok_or_else(unsupported)?, rhs.ok_or_else(unsupported)?, result.ok_or_else(unsupported)?);
        let mut operation = null_mut();
        // SAFETY: the call writes a handle.
        let status = unsafe { (f.cublasLtMatmulDescCreate)(&mut operation, compute, scale) };
        done(f, "cublasLtMatmulDescCreate", status)?;
        for (attribute, transposed) in
            [(Of::CUBLASLT_MATMUL_DESC_TRANSA, g.a.transposed), (Of::CUBLASLT_MATMUL_DESC_TRANSB, g.b.transposed)]
        {
            // `CUBLAS_OP_N` is 0, `CUBLAS_OP_T` 1.
            let value = i32::from(transposed);
            // SAFETY: the attribute has this type, and is copied.
            let status = unsafe {
                (f.cublasLtMatmulDescSetAttribute)(operation, attribute, from_ref(&value).cast(), size_of::<i32>())
            };
            done(f, "cublasLtMatmulDescSetAttribute", status)?;
        }
        let count = g.count;
        let layouts =
            [self.layout(&g.a, rhs, count)?, self.layout(&g.b, lhs, count)?, self.layout(&g.c, result, count)?];
        let found = self.best(operation, layouts, alignments)?;
        let (algorithm, workspace_bytes) = found.ok_or_else(unsupported)?;
        Ok(Prepared { operation, layouts, algorithm, workspace_bytes, double: types[0] == DType::F64 })
    }

    fn layout(&self, matrix: &Stored, data: Data, count: u64) -> Result<sys::cublasLtMatrixLayout_t, CudaError> {
        let f = &self.functions;
        let mut layout = null_mut();
        let Stored { rows, columns, leading, stride, .. } = *matrix;
        // SAFETY: the call writes a handle.
        let status = unsafe { (f.cublasLtMatrixLayoutCreate)(&mut layout, data, rows, columns, leading as i64) };
        done(f, "cublasLtMatrixLayoutCreate", status)?;
        let (count, stride) = (count as i32, stride as i64);
        let set = |attribute, value: *const c_void, bytes| {
            // SAFETY: the attribute has the type of `value`, and is copied.
            let status = unsafe { (f.cublasLtMatrixLayoutSetAttribute)(layout, attribute, value, bytes) };
            done(f, "cublasLtMatrixLayoutSetAttribute", status)
        };
        set(LayoutOf::CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT, from_ref(&count).cast(), size_of::<i32>())?;
        set(LayoutOf::CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET, from_ref(&stride).cast(), size_of::<i64>())?;
        Ok(layout)
    }

    /// The algorithm that the library ranks first, and its workspace; `None` if the library has none.
    fn best(
        &self,
        operation: sys::cublasLtMatmulDesc_t,
        [a, b, c]: [sys::cublasLtMatrixLayout_t; 3],
        [of_lhs, of_rhs, of_result]: Alignments,
    ) -> Result<Option<(sys::cublasLtMatmulAlgo_t, usize)>, CudaError> {
        let f = &self.functions;
        let mut preference = null_mut();
        // SAFETY: the call writes a handle.
        let status = unsafe { (f.cublasLtMatmulPreferenceCreate)(&mut preference) };
        done(f, "cublasLtMatmulPreferenceCreate", status)?;
        let bytes = self.workspace_bytes;
        let alignments = [
            (Preference::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, of_rhs),
            (Preference::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, of_lhs),
            (Preference::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, of_result),
            (Preference::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, of_result),
        ];
        let mut found = MaybeUninit::<sys::cublasLtMatmulHeuristicResult_t>::zeroed();
        let mut count = 0;
        // SAFETY: the attributes have these types. The call writes one result and its count. The preference is
        // destroyed once.
        let status = unsafe {
            let set = f.cublasLtMatmulPreferenceSetAttribute;
            let most = Preference::CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES;
            let status = set(preference, most, from_ref(&bytes).cast(), size_of::<u64>());
            let status = alignments.iter().fold(status, |status, (attribute, bytes)| match status {
                0 => set(preference, *attribute, from_ref(bytes).cast(), size_of::<u32>()),
                failed => failed,
            });
            let status = match status {
                0 => (f.cublasLtMatmulAlgoGetHeuristic)(
                    self.handle,
                    operation,
                    a,
                    b,
                    c,
                    c,
                    preference,
                    1,
                    found.as_mut_ptr(),
                    &mut count,
                ),
                failed => failed,
            };
            (f.cublasLtMatmulPreferenceDestroy)(preference);
            status
        };
        // The library returns these if nothing supports the request.
        if status == sys::cublasStatus_t::CUBLAS_STATUS_NOT_SUPPORTED as u32 || status == 0 && count == 0 {
            return Ok(None);
        }
        done(f, "cublasLtMatmulAlgoGetHeuristic", status)?;
        let found = found.as_ptr();
        // SAFETY: both fields are plain numbers, which were written. The status beside them may be one that its enum
        // lacks.
        let both = unsafe { (addr_of!((*found).algo).read(), addr_of!((*found).workspaceSize).read()) };
        Ok(Some(both))
    }
}

impl Drop for Blas {
    fn drop(&mut self) {
        let f = &self.functions;
        for prepared in self.prepared.values() {
            // SAFETY: each was created once and is destroyed once.
            unsafe {
                for layout in prepared.layouts {
                    (f.cublasLtMatrixLayoutDestroy)(layout);
                }
                (f.cublasLtMatmulDescDestroy)(prepared.operation);
            }
        }
        // SAFETY: as above.
        unsafe { (f.cublasLtDestroy)(self.handle) };
    }
}

/// Alignment of the operands and the result, over all products of a call.
fn alignments(g: &Gemm, starts: &[Starts], types: Types) -> Alignments {
    let [lhs, rhs, result] = types.map(DType::bytes);
    [
        alignment(starts.iter().map(|s| s.lhs), g.b.stride, lhs),
        alignment(starts.iter().map(|s| s.rhs), g.a.stride, rhs),
        alignment(starts.iter().map(|s| s.result), g.c.stride, result),
    ]
}

/// The library's name of a type, if it multiplies that type.
fn data(dtype: DType) -> Option<Data> {
    match dtype {
        DType::F64 => Some(Data::CUDA_R_64F),
        DType::F32 => Some(Data::CUDA_R_32F),
        DType::F16 => Some(Data::CUDA_R_16F),
        DType::BF16 => Some(Data::CUDA_R_16BF),
        _ => None,
    }
}

fn done(functions: &BlasFunctions, call: &'static str, status: u32) -> Result<(), CudaError> {
    if status == 0 {
        return Ok(());
    }
    // SAFETY: the call returns a text that lasts as long as the library, or null.
    let name = unsafe { (functions.cublasLtGetStatusName)(status) };
    let name = match name.is_null() {
        true => format!("code {status}"),
        // SAFETY: as above.
        false => unsafe { CStr::from_ptr(name) }.to_string_lossy().into_owned(),
    };
    Err(CudaError::Call { call, name, text: String::new() })
}
