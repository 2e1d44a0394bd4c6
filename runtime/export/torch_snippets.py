"""Parts of the exported file that are the same for every plan."""

from __future__ import annotations

CHECKPOINTED = '''
def checkpointed(module: nn.Module) -> None:
    """Keep a module's input alone for its backward, which runs its forward again."""
    module.forward = partial(checkpoint, module.forward, use_reentrant=False)
'''
ON_HOST = '''
def saved_on_host(module: nn.Module) -> None:
    """Keep on the host what a module saves for its backward, its parameters excepted."""
    forward = module.forward

    def pack(tensor):
        own = (each.to_local() if isinstance(each, DTensor) else each for each in module.parameters())
        held = {each.untyped_storage().data_ptr() for each in own}
        moves = not isinstance(tensor, DTensor) and tensor.is_floating_point()
        if not moves or tensor.untyped_storage().data_ptr() in held:
            return None, tensor
        return tensor.device, tensor.to("cpu", copy=True)

    def unpack(packed):
        device, tensor = packed
        return tensor if device is None else tensor.to(device)

    def kept(*args, **kwargs):
        with saved_tensors_hooks(pack, unpack):
            return forward(*args, **kwargs)

    module.forward = kept
'''
REDISTRIBUTED = '''
def redistribute_input(module: nn.Module, mesh: DeviceMesh, source, target, local: bool = True) -> None:
    """Give a module its first input in another placement."""

    def hook(_, args, kwargs):
        hidden = args[0] if args else kwargs["hidden_states"]
        placed = DTensor.from_local(hidden, mesh, [source], run_check=False).redistribute(placements=[target])
        placed = placed.to_local() if local else placed
        return ((placed, *args[1:]), kwargs) if args else (args, {**kwargs, "hidden_states": placed})

    module.register_forward_pre_hook(hook, with_kwargs=True)
'''
MAIN = '''
def main() -> None:
    """Train a few steps on random tokens and print the losses; every rank has its rows of each batch."""
    on_cuda = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_cuda else torch.device("cpu")
    if on_cuda:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if on_cuda else "gloo")
    torch.manual_seed(SEED)  # every rank starts from the same parameters
    model = build_model()  # on the host: fully_shard takes its parts to the device
    parallelize(model, device.type)
    optimizer = {optimizer}
    rows = dist.get_rank() // TENSOR_PARALLEL
    for step in range(STEPS):
        own = {{name: tensor.chunk(DATA_PARALLEL)[rows] for name, tensor in batch_of(step).items()}}
        loss = train_step(model, optimizer, own, device)
        dist.all_reduce(loss)
        if dist.get_rank() == 0:
            print(f"step {{step + 1}} loss {{loss.item() / dist.get_world_size():.6f}}", flush=True)
    dist.destroy_process_group()


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, rows: dict, device: torch.device) -> torch.Tensor:
    """One step of the optimizer on this rank's rows; gradients are reduced in the last backward."""
    total = torch.zeros((), device=device)
    for number in range(MICRO_BATCHES):
        part = {{name: tensor.chunk(MICRO_BATCHES)[number].to(device) for name, tensor in rows.items()}}
{accumulation}        loss = model(**part).loss / MICRO_BATCHES
        loss.backward()
        total += loss.detach()
    optimizer.step()
    optimizer.zero_grad()
    return total


if __name__ == "__main__":
    main()
'''
ACCUMULATION = """\
        is_last = number == MICRO_BATCHES - 1
        model.set_is_last_backward(is_last)
        model.set_requires_gradient_sync(is_last)
"""
FREED_LAST = """\
        for path in GATHERED_ONCE:
            model.get_submodule(path).set_reshard_after_backward(is_last, recurse=False)
"""
