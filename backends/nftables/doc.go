// SPDX-License-Identifier: Apache-2.0

// Package nftables is a sink that programs services into the Linux kernel, like the
// nftables mode of kube-proxy.
//
//	b, err := nftables.New(nftables.Options{})
//	if err != nil {
//		return err
//	}
//	return kpng.Run(ctx, opts, b)
package nftables
