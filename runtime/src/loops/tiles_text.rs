//! Prints loop programs over tiles as CUDA C++, with 64 rows per block and 16 per warp. Tensor cores compute the
//! products of 16-bit elements.
//!
//! The registers of a thread are bounded by construction. Sums of a phase take one register for every two elements of
//! their strips. Values of a tile of `c` iterations take `c / 2` for each product and for each sum. `c` is the greatest
//! of 64, 32 and 16 for which all of this is at most 160 of a thread's 255 registers. The rest is for addresses and
//! intermediate values.
//!
//! Shared memory holds the strips of all rows and of one tile of iterations. It is at most the limit of a block on an
//! A100 (CUDA C++ Programming Guide, compute capability 8.0: 163 KB).

use super::cuda::{NoArithmetic, Printer, Text, combined, computed, fingerprint, functor, number, stored};
use super::scalar::{Scalar, Var};
use super::unseen::{Unseen, bounds, hidden, unseen};
use super::{Fold, Inner, Launch, Phase, Reducer, Running, Spread, Strip};
use altiplano_ir::dtype::DType;
use std::collections::BTreeMap;

/// Rows of a tile, and the threads that process them.
const ROWS: u64 = 64;
const THREADS: u32 = 128;
/// Limit on a thread's registers for values that stay, and on a block's bytes of shared memory.
const REGISTERS: u64 = 160;
const SHARED_BYTES: u64 = 163 << 10;

/// The division of a launch into tiles.
struct Cut {
    dtype: DType,
    /// Number of consecutive rows whose iterations read the same data.
    group: u64,
    tiles: u64,
    /// Iterations per tile, for each phase.
    steps: Vec<u64>,
    /// Distinct strips of rows, and of iterations of each phase.
    of_rows: Vec<Strip>,
    of_steps: Vec<Vec<Strip>>,
    shared_bytes: u64,
}

/// Elements of a strip in shared memory, padded to whole tensor-core matrices.
fn padded(length: u64) -> u64 {
    length.max(1).next_multiple_of(16)
}

/// Stride between strips in shared memory. Rows of a matrix that are loaded together fall into different banks.
fn lead(strip: &Strip, dtype: DType) -> u64 {
    padded(strip.length) + 16 / dtype.bytes()
}

fn cut(launch: &Launch) -> Option<Cut> {
    let Spread::Tiles(group) = launch.spread else { return None };
    let mut dtypes = Vec::new();
    let (mut of_rows, mut of_steps, mut steps) = (Vec::<Strip>::new(), Vec::new(), Vec::new());
    for phase in &launch.phases {
        let mut of_step: Vec<Strip> = Vec::new();
        for inner in &phase.inner {
            if !of_rows.contains(&inner.of_row) {
                of_rows.push(inner.of_row);
            }
        }
        let all = phase.inner.iter().map(|i| i.of_step).chain(phase.outer.iter().map(|o| o.of_step));
        for strip in all {
            if !of_step.contains(&strip) {
                of_step.push(strip);
            }
        }
        dtypes.extend(of_rows.iter().chain(&of_step).map(|s| launch.params[s.param as usize].dtype));
        let sums: u64 = phase.outer.iter().map(|o| padded(o.of_step.length) / 2).sum();
        let values = (phase.inner.len() + phase.outer.len()) as u64;
        let fitting = [64, 32, 16].into_iter().find(|c| sums + values * c / 2 <= REGISTERS);
        steps.push(if of_step.is_empty() { 0 } else { fitting? });
        of_steps.push(of_step);
    }
    let dtype = *dtypes.first()?;
    if dtypes.iter().any(|d| *d != dtype) || !matches!(dtype, DType::F32 | DType::BF16 | DType::F16) || group == 0 {
        return None;
    }
    let folds = launch.phases.iter().flat_map(|p| &p.folds);
    if !launch.coordinates.is_empty() && launch.rows == 0 || folds.into_iter().any(|f| computed(f.dtype) != Ok("float"))
    {
        return None;
    }
    let bytes = |strips: &[Strip], rows: u64| strips.iter().map(|s| rows * lead(s, dtype) * dtype.bytes()).sum::<u64>();
    // The largest phase, including the space in which its sums pass between threads.
    let of_phase = |(strips, &c): (&Vec<Strip>, &u64)| {
        bytes(strips, c) + if dtype == DType::F32 { ROWS * (c + 4) * dtype.bytes() } else { 0 }
    };
    let widest = of_steps.iter().zip(&steps).map(of_phase).max().unwrap_or(0);
    let shared_bytes = bytes(&of_rows, ROWS) + widest;
    let tiles = launch.rows / group * group.div_ceil(ROWS);
    let cut = Cut { dtype, group, tiles, steps, of_rows, of_steps, shared_bytes };
    (cut.shared_bytes <= SHARED_BYTES).then_some(cut)
}

/// Returns whether the launch has a text: its types are 16-bit floats or single precision, and its tiles fit.
pub(super) fn fits(launch: &Launch) -> bool {
    cut(launch).is_some()
}

/// Prints a launch over tiles.
pub(super) fn text(launch: &Launch) -> Result<Text, NoArithmetic> {
    let Some(cut) = cut(launch) else {
        return Err(NoArithmetic(launch.params.first().map_or(DType::F64, |p| p.dtype)));
    };
    let mut body = String::new();
    let mut tiled = Tiled { printer: Printer { launch, out: &mut body }, cut: &cut, launch };
    tiled.launch()?;
    let name = format!("tiles_{:016x}", fingerprint(&body));
    let source = format!("extern \"C\" __global__ void __launch_bounds__({THREADS}) {name}{body}");
    let (threads, shared_bytes) = ((THREADS, 1), cut.shared_bytes as u32);
    Ok(Text { name, source, threads, blocks: cut.tiles, shared_bytes })
}

struct Tiled<'a, 'b> {
    printer: Printer<'b>,
    cut: &'a Cut,
    launch: &'a Launch,
}

/// The variable that holds each slot.
type Bound = BTreeMap<u32, String>;

impl Tiled<'_, '_> {
    fn line(&mut self, depth: usize, text: impl AsRef<str>) {
        self.printer.line(depth, text);
    }

    fn launch(&mut self) -> Result<(), NoArithmetic> {
        let (launch, cut) = (self.launch, self.cut);
        self.printer.signature()?;
        let element = stored(cut.dtype)?;
        let (group, per) = (cut.group, cut.group.div_ceil(ROWS));
        self.line(1, "extern __shared__ __align__(16) unsigned char shared[];");
        self.line(
            1,
            "const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, group = lane / 4, pair = lane % 4 * 2;",
        );
        let mut offset = 0;
        for (i, strip) in cut.of_rows.iter().enumerate() {
            self.line(1, format!("{element}* const r{i} = ({element}*)(shared + {offset});"));
            offset += ROWS * lead(strip, cut.dtype) * cut.dtype.bytes();
        }
        self.line(1, format!("for (I tile = blockIdx.x; tile < {}; tile += gridDim.x) {{", cut.tiles));
        self.line(2, format!("const I first = tile % {per} * {ROWS}, start = tile / {per} * {group};"));
        self.line(2, format!("const int rows = (int)({group} - first < {ROWS} ? {group} - first : {ROWS});"));
        self.line(2, "const int at[2] = {warp * 16 + group, warp * 16 + group + 8};");
        // Beyond the last row, a thread repeats the last row and writes nothing.
        self.line(2, "const I row_of[2] = {start + first + (at[0] < rows ? at[0] : rows - 1), start + first + (at[1] < rows ? at[1] : rows - 1)};");
        self.line(2, "__syncthreads();");
        for (i, strip) in cut.of_rows.iter().enumerate() {
            self.load(2, &format!("r{i}"), strip, ROWS, "rows", "const I row = start + first + local;")?;
        }
        for (phase, (&steps, strips)) in launch.phases.iter().zip(cut.steps.iter().zip(&cut.of_steps)) {
            match steps {
                0 => self.stores(phase)?,
                steps => self.sums(phase, steps, strips, offset)?,
            }
        }
        self.line(1, "}");
        self.line(0, "}");
        Ok(())
    }

    /// Copies strips into shared memory.
    fn load(
        &mut self,
        depth: usize,
        to: &str,
        strip: &Strip,
        rows: u64,
        valid: &str,
        index: &str,
    ) -> Result<(), NoArithmetic> {
        let element = stored(self.cut.dtype)?;
        let (length, lead) = (strip.length, lead(strip, self.cut.dtype));
        let sizes = format!("{element}, {rows}, {length}, {}, {lead}", padded(length));
        self.line(
            depth,
            format!("load_strips<{sizes}>({to}, p{}, {valid}, {}, [&](int local) -> I {{", strip.param, strip.stride),
        );
        self.line(depth + 1, index);
        for var in self.launch.scalars.with_operands([strip.base]) {
            self.printer.scalar(var)?;
        }
        self.line(depth + 1, format!("return v{};", strip.base.0));
        self.line(depth, "});");
        Ok(())
    }

    /// Prints code for each element of a tile that a thread holds, after the scalars that it needs.
    fn each(
        &mut self,
        phase: &Phase,
        steps: u64,
        vars: &[Var],
        bound: &Bound,
        lines: &[String],
        hides: Option<Var>,
    ) -> Result<(), NoArithmetic> {
        let last = phase.length.saturating_sub(1);
        self.line(3, "#pragma unroll");
        self.line(3, format!("for (int n = 0; n < {}; ++n)", steps / 8));
        self.line(3, "#pragma unroll");
        self.line(3, "for (int e = 0; e < 4; ++e) {");
        self.line(4, "const I row = row_of[e / 2], next = begin + 8 * n + pair + e % 2;");
        self.line(4, format!("const bool inside = next < {};", phase.length));
        self.line(4, format!("const I step = inside ? next : {last}; (void)step; (void)row;"));
        match hides {
            // These are all that is needed, since masked elements are not computed.
            Some(_) => vars.iter().try_for_each(|v| self.scalar(*v, bound, hides))?,
            None => self.scalars(vars, bound)?,
        }
        for line in lines {
            self.line(4, line);
        }
        self.line(3, "}");
        Ok(())
    }

    fn scalars(&mut self, vars: &[Var], bound: &Bound) -> Result<(), NoArithmetic> {
        let all = self.launch.scalars.with_operands(vars.iter().copied());
        all.into_iter().try_for_each(|var| self.scalar(var, bound, None))
    }

    /// Prints a scalar. A select by `hides` takes its other branch.
    fn scalar(&mut self, var: Var, bound: &Bound, hides: Option<Var>) -> Result<(), NoArithmetic> {
        match self.launch.scalars.get(var) {
            Scalar::Slot(slot, _) if bound.contains_key(slot) => {
                self.line(4, format!("const float v{} = {};", var.0, bound[slot]));
                Ok(())
            }
            Scalar::Select(dtype, [p, _, other]) if Some(*p) == hides => {
                self.line(4, format!("const {} v{} = v{};", computed(*dtype)?, var.0, other.0));
                Ok(())
            }
            _ => self.printer.scalar(var),
        }
    }

    /// Prints a phase that runs through tiles of iterations.
    fn sums(&mut self, phase: &Phase, steps: u64, strips: &[Strip], mut offset: u64) -> Result<(), NoArithmetic> {
        let (cut, element, tiles) = (self.cut, stored(self.cut.dtype)?, steps / 8);
        for fold in &phase.folds {
            let neutral = number(fold.reducer.neutral(fold.dtype), fold.dtype)?;
            self.line(2, format!("float s{0}[2] = {{{neutral}, {neutral}}};", fold.slot));
        }
        for outer in &phase.outer {
            self.line(2, format!("float s{}[{}][4] = {{}};", outer.slot, padded(outer.of_step.length) / 8));
        }
        self.line(2, format!("for (I begin = 0; begin < {}; begin += {steps}) {{", phase.length));
        for (i, strip) in strips.iter().enumerate() {
            self.line(3, format!("{element}* const c{i} = ({element}*)(shared + {offset});"));
            offset += steps * lead(strip, cut.dtype) * cut.dtype.bytes();
        }
        let own = match cut.dtype {
            DType::F32 => format!("(float*)(shared + {offset}) + warp * {}", 16 * (steps + 4)),
            _ => "(float*)0".to_string(),
        };
        self.line(3, format!("float* const own = {own};"));
        self.line(3, format!("const int there = (int)({0} - begin < {steps} ? {0} - begin : {steps});", phase.length));
        let mut bound = self.rows_bound(phase);
        self.passed_by(phase, steps, &bound)?;
        self.line(3, "__syncthreads();");
        for (i, strip) in strips.iter().enumerate() {
            let index = "const I row = start, step = begin + local; (void)row; (void)step;";
            self.load(3, &format!("c{i}"), strip, steps, "there", index)?;
        }
        self.line(3, "__syncthreads();");
        let place = |strip: &Strip| strips.iter().position(|s| s == strip).unwrap_or(0);
        for Inner { of_row, of_step, slot } in &phase.inner {
            let (rows, columns) = (cut.of_rows.iter().position(|s| s == of_row).unwrap_or(0), place(of_step));
            let (depth, lead) = (padded(of_row.length), lead(of_row, cut.dtype));
            self.line(3, format!("float a{slot}[{tiles}][4];"));
            let inner = format!("Inner<{element}, {depth}, {tiles}, {lead}>");
            self.line(3, format!("{inner}::of(a{slot}, r{rows} + warp * 16 * {lead}, c{columns}, lane);"));
            bound.insert(*slot, format!("a{slot}[n][e]"));
        }
        let mut folds: Vec<&Fold> = phase.folds.iter().collect();
        if let Some(Running { most, scaled }) = &phase.running {
            self.running(phase, steps, *most, scaled, &bound)?;
            folds.retain(|f| f.slot != *most);
            bound.extend(folds.iter().map(|f| (f.slot, "1.0f".to_string())));
            bound.insert(*most, format!("used{most}[e / 2]"));
        }
        let mut vars: Vec<Var> = folds.iter().map(|f| f.value).collect();
        let mut lines = Vec::new();
        for Fold { value, reducer, dtype, slot } in folds {
            let next = combined(*reducer, *dtype, &format!("s{slot}[e / 2]"), &format!("v{}", value.0));
            lines.push(format!("if (inside) s{slot}[e / 2] = {next};"));
        }
        for outer in &phase.outer {
            self.line(3, format!("float w{}[{tiles}][4];", outer.slot));
            vars.push(outer.value);
            lines.push(format!("w{}[n][e] = inside ? v{} : 0.0f;", outer.slot, outer.value.0));
        }
        if !vars.is_empty() {
            self.each(phase, steps, &vars, &bound, &lines, None)?;
        }
        for outer in &phase.outer {
            let (slot, strip) = (outer.slot, &outer.of_step);
            let sizes = format!("{element}, {tiles}, {}, {}", padded(strip.length) / 8, lead(strip, cut.dtype));
            self.line(3, format!("Outer<{sizes}>::add(s{slot}, w{slot}, c{}, lane, own);", place(strip)));
        }
        self.line(2, "}");
        let most = phase.running.as_ref().map(|r| r.most);
        for fold in phase.folds.iter().filter(|f| Some(f.slot) != most) {
            self.over_row(2, fold.slot, fold.reducer, fold.dtype);
        }
        for outer in &phase.outer {
            if let Some(by) = outer.divided {
                self.line(2, "#pragma unroll");
                self.line(2, format!("for (int n = 0; n < {}; ++n)", padded(outer.of_step.length) / 8));
                self.line(2, "#pragma unroll");
                self.line(2, format!("for (int e = 0; e < 4; ++e) s{}[n][e] /= s{by}[e / 2];", outer.slot));
            }
        }
        Ok(())
    }

    /// Prints the check that skips a fully masked tile.
    fn passed_by(&mut self, phase: &Phase, steps: u64, bound: &Bound) -> Result<(), NoArithmetic> {
        let launch = self.launch;
        let Some(Unseen { seen, exponential }) = unseen(&launch.scalars, phase) else { return Ok(()) };
        self.line(
            3,
            "const I l_row = start + first, h_row = l_row + rows - 1, l_step = begin, h_step = begin + there - 1;",
        );
        for text in bounds(&launch.scalars, seen) {
            self.line(3, text);
        }
        self.line(3, format!("if (!h{}) {{", seen.0));
        self.line(3, "bool adds = false;");
        let mut bound = bound.clone();
        let mut lines = vec![format!("adds = adds || inside && v{} != 0;", exponential.0)];
        if let Some(Running { most, .. }) = &phase.running {
            // If the maximum is still negative infinity, it is not above the masked values.
            bound.insert(*most, format!("s{most}[e / 2]"));
            lines.push(format!("adds = adds || s{most}[e / 2] == __int_as_float(0xff800000);"));
        }
        let vars = hidden(&launch.scalars, exponential, seen);
        self.each(phase, steps, &vars, &bound, &lines, Some(seen))?;
        self.line(3, "if (!__syncthreads_or(adds)) continue;");
        self.line(3, "}");
        Ok(())
    }

    fn over_row(&mut self, depth: usize, slot: u32, reducer: Reducer, dtype: DType) {
        let combine = functor(reducer, dtype);
        self.line(
            depth,
            format!("s{slot}[0] = over_row<{combine}>(s{slot}[0]), s{slot}[1] = over_row<{combine}>(s{slot}[1]);"),
        );
    }

    /// The slots of earlier phases, for a row.
    fn rows_bound(&self, phase: &Phase) -> Bound {
        let before = self.launch.phases.iter().take_while(|p| !std::ptr::eq(*p, phase));
        before.flat_map(|p| &p.folds).map(|f| (f.slot, format!("s{}[e / 2]", f.slot))).collect()
    }

    /// Raises the maximum to that of this tile as well, and rescales the earlier sums.
    fn running(
        &mut self,
        phase: &Phase,
        steps: u64,
        most: u32,
        scaled: &[u32],
        bound: &Bound,
    ) -> Result<(), NoArithmetic> {
        let Some(fold) = phase.folds.iter().find(|f| f.slot == most) else { return Ok(()) };
        self.line(3, format!("const float before{most}[2] = {{s{most}[0], s{most}[1]}};"));
        let next = combined(fold.reducer, fold.dtype, &format!("s{most}[e / 2]"), &format!("v{}", fold.value.0));
        let lines = [format!("if (inside) s{most}[e / 2] = {next};")];
        self.each(phase, steps, &[fold.value], bound, &lines, None)?;
        self.over_row(3, most, fold.reducer, fold.dtype);
        // If the maximum is negative infinity, nothing is subtracted, and nothing was summed.
        let lowest = "__int_as_float(0xff800000)";
        let used = |h: usize| format!("s{most}[{h}] == {lowest} ? 0.0f : s{most}[{h}]");
        self.line(3, format!("const float used{most}[2] = {{{}, {}}};", used(0), used(1)));
        let factor =
            |h: usize| format!("before{most}[{h}] == {lowest} ? 0.0f : expf(before{most}[{h}] - s{most}[{h}])");
        self.line(3, format!("const float factor{most}[2] = {{{}, {}}};", factor(0), factor(1)));
        for slot in scaled {
            match phase.outer.iter().find(|o| o.slot == *slot) {
                None => self.line(3, format!("s{slot}[0] *= factor{most}[0], s{slot}[1] *= factor{most}[1];")),
                Some(outer) => {
                    self.line(3, "#pragma unroll");
                    self.line(3, format!("for (int n = 0; n < {}; ++n)", padded(outer.of_step.length) / 8));
                    self.line(3, "#pragma unroll");
                    self.line(3, format!("for (int e = 0; e < 4; ++e) s{slot}[n][e] *= factor{most}[e / 2];"));
                }
            }
        }
        Ok(())
    }

    /// Prints a phase that writes slots to memory: those of rows, or the elements of a sum.
    fn stores(&mut self, phase: &Phase) -> Result<(), NoArithmetic> {
        let mut bound = self.rows_bound(phase);
        let sums = self.launch.phases.iter().flat_map(|p| &p.outer);
        let needed = self.launch.needs(phase);
        let taken =
            |slot: u32| needed.iter().any(|v| matches!(self.launch.scalars.get(*v), Scalar::Slot(s, _) if *s == slot));
        let wide: Vec<_> = sums.filter(|o| taken(o.slot)).collect();
        let vars: Vec<Var> = phase.stores.iter().flat_map(|s| [s.index, s.value].into_iter().chain(s.guard)).collect();
        self.line(2, "#pragma unroll");
        match wide.first() {
            None => {
                self.line(2, "for (int e = 0; e < 4; e += 2) if (pair == 0 && at[e / 2] < rows) {");
                self.line(3, "const I row = row_of[e / 2], step = 0; (void)step; (void)row;");
            }
            Some(outer) => {
                bound.extend(wide.iter().map(|o| (o.slot, format!("s{}[n][e]", o.slot))));
                self.line(2, format!("for (int n = 0; n < {}; ++n)", padded(outer.of_step.length) / 8));
                self.line(2, "#pragma unroll");
                self.line(
                    2,
                    format!(
                        "for (int e = 0; e < 4; ++e) if (at[e / 2] < rows && 8 * n + pair + e % 2 < {}) {{",
                        phase.length
                    ),
                );
                self.line(3, "const I row = row_of[e / 2], step = 8 * n + pair + e % 2; (void)step; (void)row;");
            }
        }
        self.scalars(&vars, &bound)?;
        for store in &phase.stores {
            self.printer.store(store)?;
        }
        self.line(2, "}");
        Ok(())
    }
}
