// SPDX-License-Identifier: Apache-2.0

package userspace

import "golang.org/x/net/ipv4"

// batchSize is how many datagrams are moved at once, at most.
const batchSize = 32

// maxDatagram is more than any UDP datagram has.
const maxDatagram = 1 << 16

// batch is room for some datagrams. Only the pages that datagrams fill become
// memory.
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

// reset gives each message its whole buffer to read into.
func (b *batch) reset() {
	for i := range b.messages {
		b.messages[i].Buffers[0] = b.whole[i]
		b.messages[i].Addr = nil
	}
}

// maxBatches is how many batches there are at most, 2 MiB each. A batch is used between
// system calls that do not wait, so more would only help more cores.
const maxBatches = 16

// batches has the batches, which are too large for a pool that forgets them at each
// garbage collection. It is safe for concurrent use.
type batches struct {
	free chan *batch
	// unmade has room for each batch that is made.
	unmade chan struct{}
}

func newBatches() *batches {
	return &batches{make(chan *batch, maxBatches), make(chan struct{}, maxBatches)}
}

// get returns a batch. It waits if all are in use.
func (b *batches) get() *batch {
	select {
	case batch := <-b.free:
		return batch
	default:
	}
	select {
	case batch := <-b.free:
		return batch
	case b.unmade <- struct{}{}:
		return newBatch()
	}
}

func (b *batches) put(batch *batch) {
	batch.reset()
	b.free <- batch
}
