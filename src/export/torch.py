

def mesh(device_type=None):
    """The plan's mesh over the processes of the job. Process `i` runs on device `i` of the plan's cluster.

    `device_type` is "cuda" or "cpu"; without it, CUDA where there is a GPU.
    """
    device_type = device_type or ("cuda" if torch.cuda.is_available() else "cpu")
    if device_type != "cpu" and "LOCAL_RANK" in os.environ:
        getattr(torch, device_type).set_device(int(os.environ["LOCAL_RANK"]))
    if not dist.is_initialized():
        dist.init_process_group()
    if dist.get_world_size() != len(DEVICES):
        raise ValueError(f"the plan has {len(DEVICES)} devices, but the job {dist.get_world_size()} processes")
    ranks = torch.tensor(DEVICES).reshape(tuple(MESH.values()))
    return DeviceMesh(device_type, ranks, mesh_dim_names=tuple(MESH))


def parallelize(module, mesh, root=None):
    """Makes `module` one that is trained as planned, in place, and returns it.

    `module` holds whole parameters, the same in all processes. Its parameters become DTensors over the axes of MESH.
    Inputs and results of modules with parameters are brought to the plan's layouts of activations. Blocks are
    recomputed as planned, and parameters that the plan keeps in parts are sharded by FSDP2. `root` is a module around
    it, if that is what is called.
    """
    names = _names(module)
    _check(names)
    for name in FROZEN:
        for owner, own in names.get(name, ()):
            owner._parameters[own].requires_grad_(False)
    tensor = _submesh(mesh, TENSOR)
    if tensor is not None:
        _distribute(names, tensor)
        for name, child in list(module.named_modules()):
            if name in ACTIVATIONS:
                _lay_out(child, tensor, *ACTIVATIONS[name])
    for name in RECOMPUTED:
        parent, _, own = name.rpartition(".")
        if (parent := _find(module, parent)) is not None and own in parent._modules:
            # The backward pass does not keep the modes of the forward pass.
            parent._modules[own] = checkpoint_wrapper(
                parent._modules[own],
                CheckpointImpl.NO_REENTRANT,
                context_fn=lambda: (contextlib.nullcontext(), _global_view(tensor, mesh, again=True)),
            )
    _shard(module, root or module, names, mesh)
    return module


def placements(module):
    """The placements of every parameter of a parallelized module, by the names of PARAMETERS: one for each axis."""
    found = {}
    for name, [(owner, own), *_] in _names(module).items():
        parameter = owner._parameters[own]
        of_axis = {}
        if isinstance(parameter, DTensor):
            # FSDP2 says with a class of its own that a tensor axis splits the same dimension first.
            plain = [Shard(p.dim) if p.is_shard() or hasattr(p, "dim") else p for p in parameter.placements]
            of_axis = dict(zip(parameter.device_mesh.mesh_dim_names, plain))
        flat = of_axis.get("_".join(DATA))
        found[name] = tuple(of_axis.get(axis, flat if axis in DATA and flat else Replicate()) for axis in AXES)
    return found


def shard_inputs(inputs, mesh):
    """The part of a global batch that this process computes. `inputs` maps the plan's names of inputs to tensors."""
    _check_inputs(inputs)
    for name, (dim, rows) in BATCH_DIMS.items():
        if (found := inputs[name].shape[dim]) != GLOBAL_BATCH * rows:
            raise ValueError(f"'{name}' has {found} in dimension {dim}, planned {GLOBAL_BATCH * rows}")
    return {name: _part(x, BATCH_DIMS[name][0], mesh) if name in BATCH_DIMS else x for name, x in inputs.items()}


def loss_and_gradients(module, inputs, mesh, loss=None):
    """The loss of a step over all devices, and the gradients by name. They are left in `grad` of the parameters too.

    `inputs` is this process's part of the batch, as of `shard_inputs`. `loss(module, **inputs)` gives the loss of a
    batch; without it, `module(**inputs)` does.
    """
    _check_inputs(inputs)
    if isinstance(module, Pipeline):
        return module.loss_and_gradients(inputs)
    tensor = _submesh(mesh, TENSOR)
    replicated = _Replicated.of(module)
    sharded = isinstance(module, FSDPModule)
    scale = _scale()
    total = torch.zeros((), device=next(iter(module.parameters())).device)
    for i, part in enumerate(_microbatches(inputs)):
        last = i == MICROBATCHES - 1
        if sharded:
            module.set_requires_gradient_sync(last or not REDUCE_ONCE)
            if not RESHARD:
                module.set_reshard_after_backward(last)
        replicated.last = last
        with _global_view(tensor, mesh):
            part = {name: _distributed(x, tensor, INPUTS[name]) for name, x in part.items()}
            value = module(**part) if loss is None else loss(module, **part)
            value = _whole(getattr(value, "loss", value))
            (value * scale).backward()
        total += value.detach() * scale
    replicated.finish()
    return _mean(total, mesh), _gradients(module)


def train_step(module, optimizer, inputs, mesh, loss=None):
    """A step of training. Returns the loss. `optimizer` is one of torch.optim for `module.parameters()`."""
    optimizer.zero_grad()
    value, _ = loss_and_gradients(module, inputs, mesh, loss)
    _step(optimizer)
    return value


class Pipeline(torch.nn.Module):
    """The stages of the plan that this process runs.

    `module` holds whole parameters, the same in all processes; it is traced by torch.export. `inputs` is a global batch
    like those of the steps. `loss(result, target)` gives the loss of a microbatch from what the module returns and the
    input TARGET. Without it, the module takes all inputs and returns its loss.
    """

    def __init__(self, module, mesh, inputs, loss=None):
        super().__init__()
        self.mesh, self.group, self.loss = mesh, mesh[PIPELINE].get_group(), loss
        self.tensor = _submesh(mesh, TENSOR)
        example = self.taken(_microbatches(shard_inputs(inputs, mesh))[0])
        aliases = _aliases(module)
        device = next(iter(module.parameters())).device
        split = dict.fromkeys(SPLITS, SplitPoint.BEGINNING)
        traced = torch.distributed.pipelining.pipeline(module, (), example, split_spec=split)
        wires = _wires(traced.split_gm.graph)
        rows = list(csv.reader(io.StringIO(SCHEDULE)))
        own = sorted({int(re.match(r"\d+", action)[0]) for action in rows[mesh.get_local_rank(PIPELINE)]})
        self.stages = torch.nn.ModuleList()
        for i in own:
            stage = _Stage(traced.get_stage_module(i), i, self.tensor, *wires[i])
            stage.part._aliases = aliases
            _without_copies(stage.part)
            parallelize(stage.part, mesh, stage)
            stage._replicated.hold()
            self.stages.append(stage)
        stages = [
            PipelineStage(stage, i, STAGES, device, group=self.group, get_mesh=lambda *_: self.tensor)
            for i, stage in zip(own, self.stages)
        ]
        chunks = {x: TensorChunkSpec(BATCH_DIMS[x][0]) if x in BATCH_DIMS else _Replicate() for x in example}
        self.schedule = _PipelineScheduleRuntime(
            stages, MICROBATCHES, loss_fn=self.of_microbatch, kwargs_chunk_spec=chunks, scale_grads=False
        )
        self.tied = self.groups()
        with tempfile.NamedTemporaryFile("w", suffix=".csv") as file:
            file.write(SCHEDULE)
            file.flush()
            self.schedule._load_csv(file.name, format="compute_only")

    def taken(self, inputs):
        """The inputs that the module takes."""
        return {name: x for name, x in inputs.items() if self.loss is None or name != TARGET}

    def of_microbatch(self, result, target):
        if self.loss is not None:
            result = self.loss(result, _distributed(target, self.tensor, INPUTS[TARGET]))
        return _whole(getattr(result, "loss", result)) * _scale()

    def loss_and_gradients(self, inputs):
        """As the function of this name, for the stages of this process."""
        losses, target = [], None
        if self.stages[-1].index == STAGES - 1:
            target = torch.zeros(MICROBATCHES) if self.loss is None else inputs[TARGET]
        with _global_view(self.tensor, self.mesh):
            self.schedule.step(**self.taken(inputs), target=target, losses=losses, return_outputs=False)
        total = torch.zeros((), device=next(iter(self.parameters())).device)
        for value in losses:
            total += value.detach()
        dist.all_reduce(total, group=self.group)
        found = []
        for stage in self.stages:
            stage._replicated.finish()
            found.append(_gradients(stage.part))
        for name, group in self.tied.items():
            parts = [_local(gradients[name]) for gradients in found if name in gradients]
            whole = torch.stack(parts).sum(0)
            dist.all_reduce(whole, group=group)
            for part in parts:
                part.copy_(whole)
        return _mean(total, self.mesh), {name: x for gradients in found for name, x in gradients.items()}

    def groups(self):
        """The processes that share each tied parameter of this one. All processes make all groups."""
        ranks = self.mesh.mesh.movedim(self.mesh.mesh_dim_names.index(PIPELINE), 0).flatten(1)
        found = {}
        for name, stages in TIED.items():
            lanes = sorted({self.lane(stage) for stage in stages})
            for column in ranks.T.tolist():
                own = [column[lane] for lane in lanes]
                group = dist.new_group(own)
                if dist.get_rank() in own:
                    found[name] = group
        return found

    @staticmethod
    def lane(stage):
        """The position of a stage's process along PIPELINE."""
        return next(i for i, row in enumerate(SCHEDULE.splitlines()) if f",{stage}F0," in f",{row},")


class _Stage(torch.nn.Module):
    """A part of the traced module. It takes what it and later stages need, and gives what later stages need.

    Every process has the inputs of the step, so these are not passed on.
    """

    def __init__(self, part, index, tensor, takes, args, results, gives):
        super().__init__()
        self.part, self.index, self.tensor = part, index, tensor
        self.takes, self.args, self.results, self.gives = takes, args, results, gives

    def forward(self, *values, **inputs):
        known = {name: _distributed(x, self.tensor, INPUTS[name]) for name, x in inputs.items()}
        known |= dict(zip(self.takes, values))
        result = self.part(*[known.get(arg, arg) for arg in self.args])
        if None in self.results:
            known[self.results[None]] = result
        else:
            known |= {name: result[i] for i, name in self.results.items()}
        given = tuple(known[name] for name in self.gives)
        return given[0] if len(given) == 1 else given


def _wires(graph):
    """Names of values: what each stage takes, its arguments, its results by position, and what it gives."""
    inputs = {node.name: node.target for node in graph.nodes if node.op == "placeholder"}
    stages = []
    for node in graph.nodes:
        if node.op == "call_module":
            picked = {user.args[1]: user.name for user in node.users if user.target is operator.getitem}
            names = [getattr(arg, "name", arg) for arg in node.args]
            stages.append(([inputs.get(name, name) for name in names], picked or {None: node.name}))
    result = next(node for node in graph.nodes if node.op == "output").args[0]
    result = [node.name for node in (result if isinstance(result, (tuple, list)) else [result])]
    wires, taken = [], []
    for i, (args, results) in enumerate(stages):
        later = {name for others, _ in stages[i + 1 :] for name in others} | set(result)
        known = taken + list(results.values())
        gives = [name for name in known if name in later] if i + 1 < len(stages) else result
        wires.append((taken, args, results, gives))
        taken = gives
    return wires


def _without_copies(part):
    """Deletes what a stage has of shared parameters without reading it: the trace copies them for each of their names."""
    read = set()
    for child in part.modules():
        for node in getattr(getattr(child, "graph", None), "nodes", ()):
            if node.op == "get_attr":
                read.add(id(operator.attrgetter(node.target)(child)))
    shared = part._aliases.keys() | part._aliases.values()
    for prefix, child in part.named_modules():
        for own, parameter in list(child._parameters.items()):
            if (f"{prefix}.{own}" if prefix else own) in shared and id(parameter) not in read:
                del child._parameters[own]


def _scale():
    """The part of a microbatch's loss. The mean over processes is taken later, of which a sum has as many times."""
    return 1 / MICROBATCHES if LOSS_IS_MEAN else math.prod(MESH[axis] for axis in DATA)


def _mean(total, mesh):
    if DATA:
        dist.all_reduce(total, group=_data(mesh).get_group())
    return total / math.prod(MESH[axis] for axis in DATA)


def _gradients(module):
    parameters = {name: owner._parameters[own] for name, [(owner, own), *_] in _names(module).items()}
    return {name: _summed(parameter) for name, parameter in parameters.items() if parameter.grad is not None}


def _step(optimizer):
    """Fused updates of several tensors cannot mix tensors on different meshes."""
    kinds = {getattr(p, "device_mesh", None) for group in optimizer.param_groups for p in group["params"]}
    if len(kinds) > 1:
        for group in optimizer.param_groups:
            group["foreach"] = False
    with implicit_replication():
        optimizer.step()


def _clean(name):
    return name.replace("_checkpoint_wrapped_module.", "")


def _names(module):
    """The owners of each parameter, by its name in the plan if it has one. Modules may share a parameter."""
    tied, aliases = {}, getattr(module, "_aliases", {})
    for prefix, child in module.named_modules(remove_duplicate=False):
        for own, parameter in child._parameters.items():
            if parameter is not None:
                name = _clean(f"{prefix}.{own}" if prefix else own)
                name = aliases.get(name, name)
                tied.setdefault(id(parameter), []).append((name, child, own))
    names = {}
    for owners in tied.values():
        name = next((name for name, _, _ in owners if name in PARAMETERS), owners[0][0])
        names[name] = [(child, own) for _, child, own in owners]
    return names


def _aliases(module):
    """Other names of parameters that modules share, with their names in the plan."""
    tied = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        tied.setdefault(id(parameter), []).append(name)
    aliases = {}
    for names in tied.values():
        first = next((name for name in names if name in PARAMETERS), names[0])
        aliases |= {name: first for name in names if name != first}
    return aliases


def _check(names):
    for name in names:
        if name not in PARAMETERS:
            near = difflib.get_close_matches(name, PARAMETERS, n=3)
            raise KeyError(f"the plan has no parameter '{name}'" + (f"; similar: {', '.join(near)}" if near else ""))
    missing = sorted(set(PARAMETERS) - set(names))
    if missing and STAGES == 1:
        raise KeyError(f"the module has no {', '.join(missing[:4])}, which the plan lays out")


def _find(module, name):
    for own in name.split(".") if name else ():
        module = module._modules.get(own)
        if module is None:
            return None
    return module


def _check_inputs(inputs):
    """Inputs without a batch may be buffers of the module, which has them itself."""
    if missing := sorted(set(BATCH_DIMS) - set(inputs)):
        raise KeyError(f"no input {', '.join(missing)} of the plan is given")
    if unknown := sorted(set(inputs) - set(INPUTS)):
        raise KeyError(f"the plan has no input {', '.join(unknown)}; its inputs are {', '.join(INPUTS)}")


def _submesh(mesh, axes):
    return mesh[tuple(axes)] if axes else None


def _data(mesh):
    """The axes over which processes have other samples, as one."""
    if len(DATA) == 1:
        return mesh[DATA[0]]
    return mesh[tuple(DATA)]._flatten("_".join(DATA))


def _of(name, axes):
    return tuple(placement for axis, placement in zip(AXES, PARAMETERS[name]) if axis in axes)


def _distribute(names, tensor):
    for name, owners in names.items():
        owner, own = owners[0]
        parameter = owner._parameters[own]
        whole = distribute_tensor(parameter.detach(), tensor, _of(name, TENSOR), src_data_rank=None)
        whole = torch.nn.Parameter(whole, requires_grad=parameter.requires_grad)
        for owner, own in owners:
            owner._parameters[own] = whole


def _distributed(x, tensor, layout):
    """A tensor that is the same in all processes of the tensor axes, or one in another layout, in a layout."""
    if tensor is None or not isinstance(x, torch.Tensor):
        return x
    if not isinstance(x, DTensor):
        x = DTensor.from_local(x, tensor, [Replicate()] * tensor.ndim, run_check=False)
    if any(isinstance(p, Shard) and p.dim >= x.ndim for p in layout):
        return x
    return x.redistribute(placements=layout)


def _lay_out(child, tensor, of_input, of_result):
    """Brings the first input and the result of a module to the plan's layouts."""

    def before(_, args):
        return (_distributed(args[0], tensor, of_input), *args[1:]) if args and of_input is not None else None

    def after(_, args, result):
        return _distributed(result, tensor, of_result) if of_result is not None else None

    child.register_forward_pre_hook(before)
    child.register_forward_hook(after)


def _shard(module, root, names, mesh):
    """FSDP2 for parameters that the plan keeps in parts, and reduced gradients for all others."""
    if not DATA:
        _Replicated(root, [], None)
        return
    data = _data(mesh)
    dims, kept = {}, []
    for name, owners in names.items():
        owner, own = owners[0]
        parameter = owner._parameters[own]
        placement = _of(name, DATA)[0]
        if isinstance(placement, Shard):
            dims[id(parameter)] = placement
        else:
            kept.append(parameter)
    if dims:
        options = {
            "mesh": data,
            "reshard_after_forward": RESHARD,
            "shard_placement_fn": lambda parameter: dims.get(id(parameter)),
            "ignored_params": set(kept),
        }
        for name in BLOCKS:
            if (block := _find(module, name)) is not None:
                fully_shard(block, **options)
        fully_shard(root, **options)
    _Replicated(root, [p for p in kept if p.requires_grad], data.get_group())


class _Replicated:
    """Gradients of parameters that are whole on every process of the data axes: their mean, a bucket at a time."""

    BYTES = 25_000_000

    def __init__(self, module, parameters, group):
        self.group, self.last, self.bucket, self.pending = group, True, [], []
        self.parameters = parameters
        module._replicated = self
        for parameter in parameters:
            parameter.register_post_accumulate_grad_hook(self.add)

    def hold(self):
        """Reduces nothing before the end. A pipeline adds to gradients without hooks."""
        self.last = False

    @classmethod
    def of(cls, module):
        return getattr(module, "_replicated", None) or cls(module, [], None)

    def add(self, parameter):
        if not self.last:
            return
        self.bucket.append(parameter)
        if sum(p.grad.numel() * p.grad.element_size() for p in self.bucket) >= self.BYTES:
            self.send()

    def send(self):
        """Starts the reduction of a bucket. Sums over the tensor axes are complete first."""
        for dtype in dict.fromkeys(p.grad.dtype for p in self.bucket):
            parameters = [p for p in self.bucket if p.grad.dtype == dtype]
            parts = [_local(_summed(p)) for p in parameters]
            flat = torch.cat([part.reshape(-1) for part in parts])
            self.pending.append((dist.all_reduce(flat, group=self.group, async_op=True), flat, parts))
        self.bucket = []

    def finish(self):
        if not self.last:
            self.bucket = [p for p in self.parameters if p.grad is not None]
        if self.bucket:
            self.send()
        for work, flat, parts in self.pending:
            work.wait()
            flat /= self.group.size()
            for part, mean in zip(parts, flat.split([part.numel() for part in parts])):
                part.copy_(mean.view_as(part))
        self.pending = []


def _local(x):
    return x.to_local() if isinstance(x, DTensor) else x


def _whole(x):
    return x.full_tensor() if isinstance(x, DTensor) else x


def _summed(parameter):
    """A parameter's gradient in the layout of the parameter: no process has a summand of it any more."""
    gradient = parameter.grad
    if isinstance(gradient, DTensor) and gradient.placements != parameter.placements:
        parameter.grad = gradient = gradient.redistribute(placements=parameter.placements)
    return gradient


@contextlib.contextmanager
def _global_view(tensor, mesh, again=False):
    """Ops see whole tensors. Those that the model makes itself are the same in all processes.

    `again` is for code that is recomputed inside of another view.
    """
    if tensor is None:
        yield
        return
    with contextlib.ExitStack() as stack:
        if not again:
            # Its end would be that of the outer view too.
            stack.enter_context(implicit_replication())
        stack.enter_context(_Functions(tensor))
        if mesh.device_type == "cpu":
            # The fused kernel for CPUs has no layouts.
            stack.enter_context(sdpa_kernel(SDPBackend.MATH))
        yield


class _Functions(TorchFunctionMode):
    """Functions that DTensors lack: convolutions of channels, as the weights have them, and checks of traced code."""

    def __init__(self, tensor):
        super().__init__()
        self.tensor, self.whole = tensor, [Replicate()] * tensor.ndim

    def __torch_function__(self, func, types, args=(), kwargs=None):
        name = getattr(func, "__name__", "").split(".")[0]
        if name in ("conv1d", "conv2d", "conv3d") and any(isinstance(x, DTensor) for x in args[:3]):
            return self.convolution(func, *args, **(kwargs or {}))
        if name == "_assert_tensor_metadata":
            return None
        if name == "adaptive_avg_pool2d" and isinstance(args[0], DTensor) and args[1] in (1, (1, 1), [1, 1]):
            # PyTorch sets the strides of the result, for which there is no layout.
            return args[0].mean((-2, -1), keepdim=True)
        if name in ("view", "reshape", "unflatten") and isinstance(args[0], DTensor):
            return self.reshaped(func, *args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))

    def reshaped(self, func, x, *args, **kwargs):
        try:
            return func(x, *args, **kwargs)
        except RuntimeError:
            # A split dimension, such as one of packed queries, keys and values, cannot be taken apart in place.
            split = [at if at.is_shard(0) else Replicate() for at in x.placements]
            return func(x.redistribute(placements=split), *args, **kwargs)

    def convolution(self, func, x, weight, bias=None, *args, **kwargs):
        x, weight = (t if isinstance(t, DTensor) else _distributed(t, self.tensor, self.whole) for t in (x, weight))
        grouped = (args[3] if len(args) > 3 else kwargs.get("groups", 1)) > 1
        # For each axis the layouts of x, of its gradient, of the weight, of its gradient, and of the result.
        layouts = []
        for of_x, of_weight in zip(x.placements, weight.placements):
            if of_weight.is_shard(0) and not grouped:
                layouts.append((Replicate(), Partial(), Shard(0), Shard(0), Shard(1)))
            elif of_weight.is_shard(1) and not grouped:
                layouts.append((Shard(1), Shard(1), Shard(1), Shard(1), Partial()))
            elif of_x.is_shard(0):
                layouts.append((Shard(0), Shard(0), Replicate(), Partial(), Shard(0)))
            else:
                layouts.append((Replicate(),) * 5)
        of_x, x_grad, of_weight, weight_grad, of_result = map(list, zip(*layouts))
        x = x.redistribute(placements=of_x).to_local(grad_placements=x_grad)
        weight = weight.redistribute(placements=of_weight).to_local(grad_placements=weight_grad)
        result = DTensor.from_local(func(x, weight, None, *args, **kwargs), self.tensor, of_result, run_check=False)
        if bias is None:
            return result
        # A bias is added once, to the sum.
        result = result.redistribute(placements=[Replicate() if p.is_partial() else p for p in of_result])
        return result + bias.reshape(-1, *[1] * (result.ndim - 2))


def _part(x, dim, mesh):
    """The samples of this process."""
    for axis in DATA:
        x = x.chunk(MESH[axis], dim)[mesh.get_local_rank(axis)]
    return x


def _microbatches(inputs):
    parts = {name: x.chunk(MICROBATCHES, BATCH_DIMS[name][0]) for name, x in inputs.items() if name in BATCH_DIMS}
    for name, chunks in parts.items():
        if len(chunks) != MICROBATCHES:
            raise ValueError(f"'{name}' cannot be cut into {MICROBATCHES} microbatches")
    return [{n: parts[n][i] if n in parts else x for n, x in inputs.items()} for i in range(MICROBATCHES)]
