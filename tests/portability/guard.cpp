// SPDX-License-Identifier: Apache-2.0
// Copyright the npu-custom-ops authors
// Tensors without memory may lie on a GPU that is not there: making it current does nothing.
#include <c10/core/impl/DeviceGuardImplInterface.h>
static c10::impl::DeviceGuardImplRegistrar registrar(
    c10::DeviceType::CUDA, new c10::impl::NoOpDeviceGuardImpl<c10::DeviceType::CUDA>());
