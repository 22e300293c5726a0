// SPDX-License-Identifier: Apache-2.0

package userspace

import "golang.org/x/net/ipv4"

// batchSize is the maximum number of datagrams in a batch.
const batchSize = 32

// maxDatagram is larger than any UDP datagram.
const maxDatagram = 1 << 16

// batch has memory for datagrams. The kernel allocates a page only when it is used.
type batch struct {
	messages [batchSize]ipv4.Message
	whole    [batchSize][]byte
}

func newBatch() *batch {
	b := &batch{}
	memory := make([]byte, batchSize*maxDatagram)
	for i := range b.messages {
		b.whole[i] = memory[i*maxDatagram : (i+1)*maxDatagram]
		b.messages[i].Buffers = make([][]byte, 1)
	}
	b.reset()
	return b
}

// reset makes the buffer of each message as large as possible again.
func (b *batch) reset() {
	for i := range b.messages {
		b.messages[i].Buffers[0] = b.whole[i]
		b.messages[i].Addr = nil
	}
}

// maxBatches limits the number of batches, each of which has 2 MiB. No goroutine blocks
// while it uses a batch. So it is useless to have more batches than CPU cores.
const maxBatches = 16

// batches is a pool of batches. It is safe for concurrent use. It is not a sync.Pool,
// because each garbage collection would free the batches, and allocation is expensive.
type batches struct {
	free chan *batch
	// allocations has one value per existing batch, so its capacity limits the batches.
	allocations chan struct{}
}

func newBatches() *batches {
	return &batches{make(chan *batch, maxBatches), make(chan struct{}, maxBatches)}
}

// get returns a batch. While all batches are in use, it waits.
func (b *batches) get() *batch {
	select {
	case batch := <-b.free:
		return batch
	default:
	}
	select {
	case batch := <-b.free:
		return batch
	case b.allocations <- struct{}{}:
		return newBatch()
	}
}

func (b *batches) put(batch *batch) {
	batch.reset()
	b.free <- batch
}
