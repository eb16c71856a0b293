

def mesh(devices=None):
    """The mesh of each stage. `devices` are all devices of the job, in the order of the plan's cluster: node by node."""
    return [_mesh(axes, positions, devices) for axes, positions in zip(MESH, DEVICES)]


def shard_parameters(params, mesh):
    """The parameters of each stage by their names in the plan, where the plan stores them. Stages that share a
    parameter have a copy each."""
    whole = functools.reduce(dict.__or__, PARAMETERS)
    known = _by_name(params, _arguments(params, whole), whole)
    stages = []
    for here, table in zip(mesh, PARAMETERS):
        missing = sorted(set(table) - set(known))
        if missing:
            raise KeyError(f"the tree has no {', '.join(missing[:4])}, which the plan lays out")
        own = {name: known[name] for name in table}
        stages.append(jax.device_put(own, shardings(dict(table), here), may_alias=False))
    return stages


def whole_parameters(stages, like):
    """The tree of parameters, or of their gradients, of all stages on the host. `like` has the structure of the tree."""
    known = functools.reduce(dict.__or__, stages)
    leaves = []
    for name, leaf in _named(like, _arguments(like, known)):
        if name in known:
            leaves.append(numpy.asarray(known[name]))
        else:
            leaves.append(numpy.stack([numpy.asarray(known[row]) for row in _rows(name, leaf, known)]))
    return jax.tree.unflatten(jax.tree.structure(like), leaves)


def shard_inputs(inputs, mesh):
    """The inputs of a step where the stages read them, for each stage and microbatch. `inputs` maps the names of the
    loss's arguments to their trees."""
    known = dict(_named(_with_samples(inputs, set().union(*INPUTS)), None))
    missing = sorted(set().union(*INPUTS) - set(known))
    if missing:
        raise KeyError(f"the inputs have no {', '.join(missing)}, which the plan lays out")

    def part(name, microbatch):
        if name not in BATCH_DIMS:
            return known[name]
        dim, rows = BATCH_DIMS[name], known[name].shape[BATCH_DIMS[name][0]] // MICROBATCHES
        return known[name][(slice(None),) * dim[0] + (slice(microbatch * rows, (microbatch + 1) * rows),)]

    return [
        [
            jax.device_put({name: part(name, microbatch) for name in table}, shardings(dict(table), here))
            for microbatch in range(MICROBATCHES)
        ]
        for here, table in zip(mesh, INPUTS)
    ]


def init_state(optimizer, params, mesh):
    """Makes the state of an optimizer (`init` and `update`, as in optax) of each stage where the plan stores it."""
    states = []
    for own, here, table in zip(params, mesh, STATE):
        specs = state_specs(jax.eval_shape(optimizer.init, own), own, dict(table))
        states.append(jax.jit(optimizer.init, out_shardings=shardings(specs, here))(own))
    return states


def loss_and_gradients(mesh):
    """A function of the stages' parameters and inputs that gives the loss and each stage's gradients of a step."""
    stages = [Stage(s, here) for s, here in enumerate(mesh)]
    apart = any("W" in line for line in ORDER)

    def of_step(params, inputs):
        run = _Run(stages, params, inputs, apart)
        calls = [line.split() for line in ORDER]
        at = [0] * len(calls)
        while any(i < len(line) for i, line in zip(at, calls)):
            before = list(at)
            for lane, line in enumerate(calls):
                # Devices run what they are sent in order, and at the same time as others.
                if at[lane] < len(line) and run.call(line[at[lane]]):
                    at[lane] += 1
            if at == before:
                waiting = [line[i] for i, line in zip(at, calls) if i < len(line)]
                raise RuntimeError(f"no stage can go on: {', '.join(waiting)} wait for each other")
        sums = _shared(run.sums, stages)
        return run.loss(), [stage.finished(*of_stage) for stage, *of_stage in zip(stages, sums, params)]

    return of_step


def train_step(optimizer, mesh, params, state, inputs):
    """The step: (params, state, inputs) -> (params, state, loss). It donates parameters and state.

    `optimizer` has `init` and `update`, as in optax, and updates one stage at a time: an optimizer that combines
    gradients of all parameters, as clipping by their norm does, sees those of one stage.
    """
    gradients_of = loss_and_gradients(mesh)
    updates = []
    for s, here in enumerate(mesh):
        stored = shardings(dict(STATE[s]), here)
        of_params = shardings(dict(PARAMETERS[s]), here)
        of_state = shardings(state_specs(state[s], params[s], dict(STATE[s])), here)
        frozen = [name in FROZEN for name in sorted(PARAMETERS[s])]

        def update(params, state, gradients, stored=stored, frozen=frozen):
            return _updated(optimizer, gradients, state, params, stored, frozen)

        updates.append(jax.jit(update, out_shardings=(of_params, of_state), donate_argnums=(0, 1)))

    def step(params, state, inputs):
        value, gradients = gradients_of(params, inputs)
        updated = [update(*of_stage) for update, *of_stage in zip(updates, params, state, gradients)]
        return [p for p, _ in updated], [s for _, s in updated], value

    return step


class Stage:
    """The jitted functions of one stage on its mesh."""

    def __init__(self, number, mesh):
        self.number, self.mesh, self.at = number, mesh, _at(mesh)
        self.trained = [name for name in PARAMETERS[number] if name not in FROZEN]
        self.received = RECEIVES[number]
        # The stages that receive each value that this one computes, and those that send its gradient back.
        self.receivers = {key: [s for s, table in enumerate(RECEIVES) if key in table] for key in SENDS[number]}
        back = {key: [s for s in receivers if RECEIVES[s][key][2]] for key, receivers in self.receivers.items()}
        self.back = {key: receivers for key, receivers in back.items() if receivers}
        self.forward = jax.jit(self._forward)
        self.backward = jax.jit(self._backward, donate_argnums=2)
        self.zeros = jax.jit(self._zeros, out_shardings={name: self.sharding(GRADIENTS[number][name]) for name in self.trained})
        self.finished = jax.jit(self._finished)
        self.parts = None

    def sharding(self, spec):
        return NamedSharding(self.mesh, spec)

    def _forward(self, params, values):
        """The stage's results, and the function from their cotangents to those of parameters and received values."""
        trained = {name: params[name] for name in self.trained}
        differentiated = {key: values[key] for key, (_, _, back) in self.received.items() if back}

        def results(trained, differentiated):
            results = STAGES[self.number](self.at, params | trained, values | differentiated)
            results = {key: self.at(x, SENDS[self.number][key]) if key != "loss" else x for key, x in results.items()}
            pulled = {key: x for key, x in results.items() if key in self.back or key == "loss"}
            return pulled, {key: x for key, x in results.items() if key not in pulled}

        pulled, pull, others = jax.vjp(results, trained, differentiated, has_aux=True)
        return pulled | others, pull

    def _pulled(self, pull, cotangents):
        gradients, received = pull({key: sum(parts[1:], parts[0]) for key, parts in cotangents.items()})
        return {key: self.at(x, self.received[key][1]) for key, x in received.items()}, gradients

    def _added(self, sums, gradients):
        return {name: self.at(sums[name] + g, GRADIENTS[self.number][name]) for name, g in gradients.items()}

    def _backward(self, pull, cotangents, sums):
        received, gradients = self._pulled(pull, cotangents)
        return received, self._added(sums, gradients)

    def _zeros(self, params):
        """Sums of half-precision gradients are in single precision."""
        shapes = {name: params[name] for name in self.trained}
        return {name: jnp.zeros(p.shape, jnp.promote_types(p.dtype, "float32")) for name, p in shapes.items()}

    def _finished(self, sums, params):
        scale = MICROBATCHES if LOSS_IS_MEAN else 1
        done = {name: (x / scale).astype(params[name].dtype) for name, x in sums.items()}
        done = {name: self.at(x, GRADIENTS[self.number][name]) for name, x in done.items()}
        return done | {name: jnp.zeros_like(p) for name, p in params.items() if name not in done}

    def in_parts(self, pull, cotangents):
        """The cotangents of received values, and a function that later gives the sums with the gradients added."""
        if self.parts is None:
            early, late = _in_two(self._pulled, (pull, cotangents))
            add = lambda sums, rest: self._added(sums, late(rest))
            self.parts = jax.jit(early), jax.jit(add, donate_argnums=0)
        received, rest = self.parts[0](pull, cotangents)
        return received, lambda sums: self.parts[1](sums, rest)


class _Run:
    """One step while it runs."""

    def __init__(self, stages, params, inputs, apart):
        self.stages, self.params, self.inputs, self.apart = stages, params, inputs, apart
        self.sums = [stage.zeros(own) for stage, own in zip(stages, params)]
        self.values, self.cotangents, self.pulls, self.waiting, self.losses = {}, {}, {}, {}, []
        self.totals = [
            _total([TOTALS[s](x) for x in inputs[s]]) if TOTALS[s] else {}
            for s in range(len(stages))
        ]

    def call(self, name):
        """Runs a call if all that it reads has arrived. Returns whether it has."""
        stage, microbatch = name[1:].split(":")
        stage, microbatch = self.stages[int(stage)], int(microbatch)
        return {"F": self.forward, "B": self.backward, "W": self.weights}[name[0]](stage, microbatch)

    def forward(self, stage, microbatch):
        places = {key: (stage.number, key, microbatch) for key in stage.received}
        if not all(place in self.values for place in places.values()):
            return False
        values = {key: self.values.pop(place) for key, place in places.items()}
        values |= self.inputs[stage.number][microbatch] | self.totals[stage.number]
        results, self.pulls[stage.number, microbatch] = stage.forward(self.params[stage.number], values)
        for key, receivers in stage.receivers.items():
            for s in receivers:
                sharding = self.stages[s].sharding(RECEIVES[s][key][1])
                self.values[s, key, microbatch] = jax.device_put(results[key], sharding)
        if "loss" in results:
            self.losses.append(results["loss"])
        return True

    def backward(self, stage, microbatch):
        places = {key: [(s, key, microbatch) for s in receivers] for key, receivers in stage.back.items()}
        if not all(place in self.cotangents for each in places.values() for place in each):
            return False
        cotangents = {key: [self.cotangents.pop(place) for place in each] for key, each in places.items()}
        if stage.number == LOSS_STAGE:
            cotangents["loss"] = [jnp.ones((), self.losses[0].dtype)]
        pull = self.pulls.pop((stage.number, microbatch))
        if self.apart:
            received, self.waiting[stage.number, microbatch] = stage.in_parts(pull, cotangents)
        else:
            received, self.sums[stage.number] = stage.backward(pull, cotangents, self.sums[stage.number])
        for key, x in received.items():
            source = stage.received[key][0]
            sharding = self.stages[source].sharding(SENDS[source][key])
            self.cotangents[stage.number, key, microbatch] = jax.device_put(x, sharding)
        return True

    def weights(self, stage, microbatch):
        self.sums[stage.number] = self.waiting.pop((stage.number, microbatch))(self.sums[stage.number])
        return True

    def loss(self):
        value = sum(self.losses[1:], self.losses[0])
        return value / MICROBATCHES if LOSS_IS_MEAN else value


def _shared(sums, stages):
    """Each stage's gradients. Those of a parameter that several stages hold are added."""
    for name in set().union(*(stage.trained for stage in stages)):
        holders = [stage for stage in stages if name in stage.trained]
        if len(holders) == 1:
            continue
        first = holders[0].sharding(GRADIENTS[holders[0].number][name])
        parts = [jax.device_put(sums[stage.number][name], first) for stage in holders]
        total = sum(parts[1:], parts[0])
        for stage in holders:
            sums[stage.number][name] = jax.device_put(total, stage.sharding(GRADIENTS[stage.number][name]))
    return sums


def _in_two(function, arguments):
    """Two functions that do what `function` does, which gives two results. The first one computes what the first result
    needs, and leaves the rest to the second one."""
    closed, shapes = jax.make_jaxpr(function, return_shape=True)(*arguments)
    count, trees = len(jax.tree.leaves(shapes[0])), [jax.tree.structure(shape) for shape in shapes]
    inputs = [object() for _ in closed.jaxpr.invars]
    equations = []
    results = _flat(closed, inputs, equations)
    now, later = results[:count], results[count:]
    needed, is_early = set(map(id, now)), []
    for _, operands, made in reversed(equations):
        is_early.append(any(id(x) in needed for x in made))
        needed |= set(map(id, operands)) if is_early[-1] else set()
    first = [equation for equation, early in zip(equations, reversed(is_early)) if early]
    second = [equation for equation, early in zip(equations, reversed(is_early)) if not early]
    made = {id(out) for equation in second for out in equation[2]}
    wanted = [x for equation in second for x in equation[1]] + later
    rest = list({id(x): x for x in wanted if id(x) not in made and not isinstance(x, _Known)}.values())

    def early(*arguments):
        known = _evaluated(first, dict(zip(map(id, inputs), jax.tree.leaves(arguments))))
        return jax.tree.unflatten(trees[0], [known(x) for x in now]), [known(x) for x in rest]

    def late(values):
        known = _evaluated(second, dict(zip(map(id, rest), values)))
        return jax.tree.unflatten(trees[1], [known(x) for x in later])

    return early, late


class _Known:
    """A constant of a program."""

    def __init__(self, value):
        self.value = value


def _flat(closed, inputs, equations):
    """Appends the equations of a program, with those of calls in it. Returns its results."""
    known = dict(zip(closed.jaxpr.constvars, map(_Known, closed.consts))) | dict(zip(closed.jaxpr.invars, inputs))
    read = lambda x: _Known(x.val) if isinstance(x, jax.extend.core.Literal) else known[x]
    for equation in closed.jaxpr.eqns:
        operands, inner = [read(x) for x in equation.invars], equation.params.get("jaxpr")
        if equation.primitive.name in ("remat2", "checkpoint", "jit", "pjit") and inner is not None:
            is_closed = isinstance(inner, jax.extend.core.ClosedJaxpr)
            results = _flat(inner if is_closed else jax.extend.core.ClosedJaxpr(inner, ()), operands, equations)
        else:
            results = [object() for _ in equation.outvars]
            equations.append((equation, operands, results))
        known |= dict(zip(equation.outvars, results))
    return [read(x) for x in closed.jaxpr.outvars]


def _evaluated(equations, values):
    """Runs equations. Returns the function from a value's place to the value."""
    known = lambda x: x.value if isinstance(x, _Known) else values[id(x)]
    for equation, operands, results in equations:
        primitive = equation.primitive
        found = primitive.bind(*map(known, operands), **primitive.get_bind_params(equation.params))
        values |= dict(zip(map(id, results), found if primitive.multiple_results else [found]))
    return known
